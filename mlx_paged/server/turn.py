"""A turn of a conversation in any API: its input, and the reading of its answers.

Chat completions, responses and messages make a `Turn` from their bodies. `turn_preparation.prepare`
renders the prompt and determines the grammar and the format of the answers. An API only has to
express an answer's events (`parsing.events`) in its own form.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mlx_paged.engine.chat.rewrites import Spelling
from mlx_paged.engine.grammar import StructuredOutputs
from mlx_paged.engine.media import PreparedMedia
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.parsing.answer import Answer, AnswerReader, answer_reader
from mlx_paged.parsing.definitions import Tool, ToolChoice
from mlx_paged.parsing.events import ContentText, Event
from mlx_paged.parsing.format import ToolFormat
from mlx_paged.server.conversation import Conversation
from mlx_paged.server.generation import Generation, Piece
from mlx_paged.server.served_model import ServedModel
from mlx_paged.server.streaming import Adapter


@dataclass(frozen=True)
class Turn:
    """A client's request for an answer.

    Attributes:
        conversation: The messages.
        tools: All tools.
        choice: Tools that the model may call this time.
        structured_outputs: Constraint on its text; None means none.
        names: The body's names of the fields of structured outputs, for errors
            (`errors.own_name`).
        parses: True separates calls and reasoning from text; False takes the whole answer as text.
    """

    conversation: Conversation
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    structured_outputs: StructuredOutputs | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    parses: bool = True


@dataclass(frozen=True)
class PreparedTurn:
    """A turn ready for the model.

    Attributes:
        prompt: Tokens of the conversation.
        media: Its images, videos and sounds, or None.
        params: Parameters of the answers, including their grammar.
        tools: Tools that an answer may call.
        relaxed: Parts of schemas that are not enforced.
        forces_a_call: True if answers consist of calls and reasoning only.
        names: The body's names of the fields of structured outputs, for errors.
    """

    prompt: list[int]
    media: PreparedMedia | None
    params: SamplingParams
    tools: tuple[Tool, ...]
    relaxed: tuple[str, ...]
    forces_a_call: bool
    names: Mapping[str, str]
    _model: ServedModel
    _format: ToolFormat | None
    _reads_markers: bool
    _shows_special: bool
    _spelling: Spelling
    _num_calls: int

    @property
    def is_plain(self) -> bool:
        """True if the whole answer is text, so that nothing has to be separated."""
        return not self._reads_markers

    def reader(self) -> AnswerReader:
        """Returns a reader for one of the answers."""
        renderer = self._model.renderer
        tool_format = self._format if self._reads_markers else None
        reasoning = self._model.reasoning_format if self._reads_markers else None
        skipped = {} if self._shows_special else renderer.special_texts
        ends = () if self._shows_special else renderer.end_texts
        return answer_reader(
            tool_format,
            reasoning,
            self.tools,
            self.prompt,
            renderer.added_tokens,
            skipped,
            renderer.tokenizer.decode,
            ends,
            lambda name, index: self._spelling.new_id(name, self._num_calls + index),
            is_calls=self.forces_a_call,
        )


def plain_turn(
    model: ServedModel, prompt: list[int], params: SamplingParams, names: Mapping[str, str]
) -> PreparedTurn:
    """Returns a turn whose prompt no template renders, and whose whole answer is text.

    Args:
        names: See `PreparedTurn`.
    """
    return PreparedTurn(
        prompt, None, params, (), (), False, names, model, None, False, True, Spelling(), 0
    )


class AnswerReaders:
    """Reads the n answers of a turn.

    Args:
        turn: The prepared turn.
    """

    def __init__(self, turn: PreparedTurn) -> None:
        self.turn = turn
        self._readers = [turn.reader() for _ in range(turn.params.n)]

    def __getitem__(self, index: int) -> AnswerReader:
        return self._readers[index]

    def __iter__(self) -> Iterator[AnswerReader]:
        return iter(self._readers)

    def read(self, piece: Piece) -> list[Event]:
        """Returns the events of a piece, and adds them to its answer."""
        reader = self._readers[piece.index]
        events: list[Event] = []
        for token, text in piece.updates:
            events += reader.feed(token, text)
        if piece.finish_reason is not None:
            events += reader.finish(is_cut=piece.is_cut)
        return events

    async def run(self, generation: Generation) -> None:
        """Reads all answers to their ends."""
        async for piece in generation.pieces():
            self.read(piece)


class TurnAdapter(Adapter):
    """The form of a turn's answers in an API, from their events.

    Args:
        generation: Not submitted yet.
        turn: Prepared, with the same prompt and parameters.

    Attributes:
        readers: The reader of each of the n answers; `readers[i].answer` is its content so far.
    """

    def __init__(self, generation: Generation, turn: PreparedTurn) -> None:
        super().__init__(generation)
        self.turn = turn
        self.readers = AnswerReaders(turn)

    @property
    def relaxed(self) -> tuple[str, ...]:
        return self.turn.relaxed

    def answer(self, index: int) -> Answer:
        """Returns the contents of an answer so far; plain text only once it has ended."""
        if self.turn.is_plain:
            answer = Answer()
            if text := self.generation.outputs[0].outputs[index].text:
                answer.add(ContentText(text), ())
            return answer
        return self.readers[index].answer

    @abstractmethod
    def events(self, piece: Piece, events: Sequence[Event]) -> Iterable[bytes]:
        """Converts the events of an answer to those of the stream.

        Args:
            piece: Their tokens, log-probabilities and reasons.
        """

    def piece(self, piece: Piece) -> Iterable[bytes]:
        if not self.turn.is_plain:
            return self.events(piece, self.readers.read(piece))
        text = piece.text
        return self.events(piece, [ContentText(text)] if text else [])

    async def run(self) -> None:
        if self.turn.is_plain:
            await self.generation.finish()
        else:
            await self.readers.run(self.generation)
