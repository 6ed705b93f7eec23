"""Questions about scenes in many wordings, with short true answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .scenes import CHARACTERS, KINDS, NAMES, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLURALS = {"cross": "crosses"}
NOUNS = ("dog", "cat", "person", "car", "house", "tree", "face", "bird", "flower", "table")


class Turn(NamedTuple):
    """A question with its answer; `kind` is the type of question, for accuracy by kind."""

    kind: str
    question: str
    answer: str


def noun(kind: str, count: int = 1) -> str:
    """Returns the word for a shape or character."""
    if kind in CHARACTERS:
        return f"{kind}s" if count != 1 else kind
    return kind if count == 1 else PLURALS.get(kind, f"{kind}s")


def article(word: str) -> str:
    """Returns the word with a or an before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def phrase(count: int, color: str, kind: str) -> str:
    """Returns "three red circles" or "a blue square"."""
    if count == 1:
        return article(f"{color} {noun(kind)}")
    return f"{NUMBERS[count]} {color} {noun(kind, count)}"


def listing(parts: list[str]) -> str:
    """Joins parts: a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(text: str) -> str:
    """Capitalizes the text and adds a period."""
    return f"{text[0].upper()}{text[1:]}."


def content(scene: Scene) -> str:
    """Describes the contents of a scene as a phrase."""
    if scene.text:
        what = "number" if scene.text.isdigit() else "text"
        if len(scene.text) == 1:
            what = "digit" if scene.text.isdigit() else "letter"
        return f"the {what} {scene.text} in {scene.things[0].color}"
    if not scene.things:
        return "nothing"
    return listing([phrase(*group) for group in scene.groups()])


def describe(scene: Scene) -> str:
    """Describes the scene in a full sentence."""
    ground = "" if scene.background is None else f" on {article(scene.background)} background"
    return f"The picture shows {content(scene)}{ground}."


PICTURE = ("picture", "picture", "image", "image", "photo")


def _what(r: Random, s: Scene) -> Turn:
    p = r.choice(PICTURE)
    q = r.choice(
        (
            f"What is in the {p}?",
            f"What is in this {p}?",
            f"What's in this {p}?",
            f"What does this {p} show?",
            f"What does the {p} show?",
            f"What can you see in the {p}?",
            f"What is shown in this {p}?",
            "What do you see?",
            "What do you see here?",
            "What is this?",
            f"What do you see in this {p}?",
            "List the shapes." if not s.text else "What is this?",
        )
    )
    return Turn("content", q, sentence(content(s)))


def _describe(r: Random, s: Scene) -> Turn:
    p = r.choice(PICTURE)
    q = r.choice(
        (
            f"Describe the {p}.",
            f"Describe this {p}.",
            f"Describe this {p} in one sentence.",
            f"Please describe the {p}.",
            f"Can you describe this {p}?",
            f"Describe the {p} in detail.",
            f"Tell me about this {p}.",
            "Describe what you see.",
            f"Give a caption for this {p}.",
        )
    )
    return Turn("describe", q, describe(s))


def _count(r: Random, s: Scene) -> Turn | None:
    """Counts shapes by kind, color, both or neither."""
    shapes = [t for t in s.things if t.kind in KINDS]
    if s.text:
        return None
    kind = r.choice(shapes).kind if shapes and r.random() < 0.85 else r.choice(KINDS)
    color = r.choice(s.things).color if r.random() < 0.85 else r.choice(NAMES)
    draw = r.random()
    if draw < 0.35:
        what, singular, count = noun(kind, 2), noun(kind), sum(t.kind == kind for t in shapes)
    elif draw < 0.6:
        what, singular = f"{color} {noun(kind, 2)}", f"{color} {noun(kind)}"
        count = sum(t.kind == kind and t.color == color for t in shapes)
    elif draw < 0.8 or len(shapes) < len(s.things):
        word = r.choice(("shapes", "shapes", "objects"))
        if len(shapes) < len(s.things):
            return None
        what, singular, count = word, word[:-1], len(shapes)
    else:
        word = r.choice(("shapes", "objects"))
        if len(shapes) < len(s.things):
            return None
        what, singular = f"{color} {word}", f"{color} {word[:-1]}"
        count = sum(t.color == color for t in shapes)
    p = r.choice(PICTURE)
    if r.random() < 0.2:
        q = r.choice(
            (
                f"How many {what} are there? Answer with a number.",
                f"How many {what} are in the {p}? Answer with a digit.",
                f"Count the {what}. Answer with a number.",
                f"How many {what}? Reply with just a number.",
            )
        )
        return Turn("count", q, str(count))
    q = r.choice(
        (
            f"How many {what} are there?",
            f"How many {what} are in the {p}?",
            f"How many {what} do you see?",
            f"How many {what} are in this {p}?",
            f"How many {what} can you see?",
            f"How many {what}?",
            f"Count the {what}.",
            f"Please count the {what} in the {p}.",
            f"What is the number of {what}?",
        )
    )
    if r.random() < 0.15:
        q = f"Number of {what}?"
    are = "is" if count == 1 else "are"
    return Turn("count", q, f"There {are} {NUMBERS[count]} {singular if count == 1 else what}.")


def _color(r: Random, s: Scene) -> Turn | None:
    col = r.choice(("color", "color", "colour"))
    if s.text:
        what = "digit" if s.text.isdigit() else "letter"
        what = what if len(s.text) == 1 else {"digit": "number", "letter": "text"}[what]
        q = r.choice((f"What {col} is the {what}?", f"Which {col} is the {what}?"))
        return Turn("color", q, sentence(s.things[0].color))
    kind = r.choice(s.things).kind
    found = [g for g in s.groups() if g[2] == kind]
    number = sum(g[0] for g in found)
    the = "the " + noun(kind, number)
    are = "is" if number == 1 else "are"
    choices = [
        f"What {col} {are} {the}?",
        f"Which {col} {are} {the}?",
        f"What is the {col} of {the}?",
    ]
    if len(s.groups()) == 1:
        shape = "shape" if number == 1 else "shapes"
        choices += [
            f"What {col} {are} the {shape}?",
            f"What {col} {are} {'it' if number == 1 else 'they'}?",
        ]
    colors = [name for name in NAMES if any(g[1] == name for g in found)]
    return Turn("color", r.choice(choices), sentence(listing(colors)))


def _colors(r: Random, s: Scene) -> Turn | None:
    if s.text:
        return None
    colors = [name for name in NAMES if any(t.color == name for t in s.things)]
    if r.random() < 0.4:
        count = len(colors)
        q = r.choice(
            ("How many colors do the shapes have?", "How many different colors do you see?")
        )
        return Turn("color", q, sentence(NUMBERS[count]))
    q = r.choice(
        (
            "What colors are the shapes?",
            "Which colors do the shapes have?",
            "What colours are the shapes?",
            "Name the colors of the shapes.",
        )
    )
    return Turn("color", q, sentence(listing(colors)))


def _is_there(r: Random, s: Scene) -> Turn | None:
    p = r.choice(PICTURE)
    place = r.choice((f" in the {p}", f" in this {p}", "", ""))
    if r.random() < 0.12:
        return Turn("exists", f"Is there {article(r.choice(NOUNS))}{place}?", "No.")
    things = [t for t in s.things if t.kind in KINDS]
    true = bool(things) and r.random() < 0.5
    model: Thing | None = r.choice(things) if true else None
    kind = model.kind if model else r.choice(KINDS)
    color = model.color if model else r.choice(NAMES)
    if things and not true and r.random() < 0.6:  # wrong in only one respect
        other = r.choice(things)
        kind, color = (other.kind, color) if r.random() < 0.5 else (kind, other.color)
    draw = r.random()
    if draw < 0.5:
        what, plural = f"{color} {noun(kind)}", f"{color} {noun(kind, 2)}"
        answer = any(t.kind == kind and t.color == color for t in things)
    elif draw < 0.8:
        what, plural = noun(kind), noun(kind, 2)
        answer = any(t.kind == kind for t in things)
    elif s.text or len(things) < len(s.things):
        return None
    else:
        what, plural = f"{color} shape", f"{color} shapes"
        answer = any(t.color == color for t in things)
    q = r.choice(
        (
            f"Is there {article(what)}{place}?",
            f"Is there {article(what)}{place}?",
            f"Do you see {article(what)}{place}?",
            f"Are there any {plural}{place}?",
            f"Can you see {article(what)}{place}?",
            f"Does the {p} contain {article(what)}?",
        )
    )
    return Turn("exists", q, "Yes." if answer else "No.")


def _which_shape(r: Random, s: Scene) -> Turn | None:
    if s.text or any(t.kind in CHARACTERS for t in s.things):
        return None
    color = r.choice(s.things).color
    found = [g for g in s.groups() if g[1] == color]
    number = sum(g[0] for g in found)
    kinds = [k for k in KINDS if any(g[2] == k for g in found)]
    words = [article(k) if number == 1 else noun(k, 2) for k in kinds]
    if len(kinds) > 1 or number > 1:
        words = [noun(k, sum(g[0] for g in found if g[2] == k)) for k in kinds]
    if number == 1:
        choices = [
            f"What shape is {color}?",
            f"Which shape is {color}?",
            f"What is the {color} shape?",
        ]
    else:
        choices = [f"What are the {color} shapes?", f"Which shapes are {color}?"]
    if len(s.groups()) == 1:
        choices += ["What shape is it?"] if number == 1 else ["What shapes are they?"]
        choices += ["What shape is this?"] if number == 1 else ["What kind of shapes are these?"]
    return Turn("shape", r.choice(choices), sentence(listing(words)))


def _background(r: Random, s: Scene) -> Turn | None:
    if s.background is None:
        return None
    q = r.choice(
        (
            "What color is the background?",
            "What colour is the background?",
            "Which color does the background have?",
            "What is the background color?",
            "What's the color of the background?",
        )
    )
    return Turn("background", q, sentence(s.background))


def _single(s: Scene) -> list[Thing]:
    """Things with a unique combination of kind and color."""
    number = Counter((t.color, t.kind) for t in s.things)
    return [t for t in s.things if number[t.color, t.kind] == 1]


def _name(r: Random, s: Scene, thing: Thing) -> str:
    """A name that identifies this thing, with or without its color."""
    if sum(t.kind == thing.kind for t in s.things) == 1 and r.random() < 0.5:
        return noun(thing.kind)
    return f"{thing.color} {noun(thing.kind)}"


def _where(r: Random, s: Scene) -> Turn | None:
    if s.text:
        return None
    singles = _single(s)
    if not singles:
        return None
    t = r.choice(singles)

    def third(value: float) -> int | None:
        for index, (low, high) in enumerate(((0, 0.29), (0.38, 0.62), (0.71, 1))):
            if low <= value <= high:
                return index
        return None

    column, row = third(t.x / s.width), third(t.y / s.height)
    if column is None or row is None:
        return None
    name = _name(r, s, t)
    q = r.choice(
        (
            f"Where is the {name}?",
            f"Where is the {name} in the picture?",
            f"Where do you see the {name}?",
        )
    )
    if row == 1 and column == 1:
        return Turn("place", q, "In the center.")
    if row == 1:
        return Turn("place", q, "On the left." if column == 0 else "On the right.")
    vertical = "top" if row == 0 else "bottom"
    if column == 1:
        return Turn("place", q, f"At the {vertical}.")
    return Turn("place", q, f"In the {vertical} {'left' if column == 0 else 'right'}.")


def _relation(r: Random, s: Scene) -> Turn | None:
    singles = _single(s)
    if len(singles) < 2 or s.text:
        return None
    a, b = r.sample(singles, 2)
    dx, dy = a.x - b.x, a.y - b.y
    if max(abs(dx), abs(dy)) < 0.15:
        return None
    sideways = abs(dx) >= 0.15 and (abs(dy) < 0.15 or r.random() < 0.5)
    if sideways:
        word, true = r.choice(
            (
                ("to the left of", dx < 0),
                ("to the right of", dx > 0),
                ("left of", dx < 0),
                ("right of", dx > 0),
            )
        )
    else:
        word, true = r.choice((("above", dy < 0), ("below", dy > 0)))
    one, two = _name(r, s, a), _name(r, s, b)
    if one == two:
        return None
    if len(s.things) == 2 and r.random() < 0.4:
        target = a if true else None
        if target is not None:
            return Turn(
                "relation",
                f"What is {word} the {two}?",
                sentence(article(f"{a.color} {noun(a.kind)}")),
            )
    return Turn("relation", f"Is the {one} {word} the {two}?", "Yes." if true else "No.")


def _side(r: Random, s: Scene) -> Turn | None:
    """The things at the left, right, top and bottom."""
    if s.text or len(s.things) < 2 or len(s.things) > 5:
        return None
    key: Callable[[Thing], float]
    word, key = r.choice(
        (
            ("on the left", lambda t: t.x),
            ("on the right", lambda t: -t.x),
            ("at the top", lambda t: t.y),
            ("at the bottom", lambda t: -t.y),
        )
    )
    order = sorted(s.things, key=key)
    if key(order[1]) - key(order[0]) < 0.12:
        return None
    t = order[0]
    q = f"What is {word}?" if len(s.things) == 2 else f"Which shape is furthest {word}?"
    if len(s.things) > 2 and any(x.kind in CHARACTERS for x in s.things):
        return None
    return Turn("relation", q, sentence(article(f"{t.color} {noun(t.kind)}")))


def _size(r: Random, s: Scene) -> Turn | None:
    singles = [t for t in _single(s) if t.kind in KINDS]
    if len(singles) < 2 or s.text:
        return None
    a, b = r.sample(singles, 2)
    if max(a.radius, b.radius) < 1.35 * min(a.radius, b.radius):
        return None
    one, two = f"{a.color} {noun(a.kind)}", f"{b.color} {noun(b.kind)}"
    bigger = a.radius > b.radius
    word, asks_big = r.choice((("bigger", True), ("larger", True), ("smaller", False)))
    winner = one if bigger == asks_big else two
    if r.random() < 0.5:
        return Turn(
            "size", f"Is the {one} {word} than the {two}?", "Yes." if winner == one else "No."
        )
    return Turn("size", f"Which is {word}, the {one} or the {two}?", sentence(f"the {winner}"))


def _more(r: Random, s: Scene) -> Turn | None:
    kinds = Counter(t.kind for t in s.things if t.kind in KINDS)
    colors = Counter(t.color for t in s.things)
    if s.text:
        return None
    if len(kinds) >= 2 and r.random() < 0.6:
        a, b = r.sample(list(kinds), 2)
        if kinds[a] == kinds[b]:
            return None
        one, two = noun(a, 2), noun(b, 2)
        winner = one if kinds[a] > kinds[b] else two
    elif len(colors) >= 2 and len(kinds) and sum(kinds.values()) == len(s.things):
        a, b = r.sample(list(colors), 2)
        if colors[a] == colors[b]:
            return None
        one, two = f"{a} shapes", f"{b} shapes"
        winner = one if colors[a] > colors[b] else two
    else:
        return None
    return Turn("more", f"Are there more {one} or more {two}?", sentence(f"more {winner}"))


def _read(r: Random, s: Scene) -> Turn | None:
    if s.text:
        text = s.text
    else:
        found = [t.kind for t in s.things if t.kind in CHARACTERS]
        if len(found) != 1:
            return None
        text = found[0]
    p = r.choice(PICTURE)
    if text.isdigit():
        word = "digit" if len(text) == 1 else "number"
    else:
        word = "letter" if len(text) == 1 else "text"
    choices = [
        f"Which {word} is this?" if word != "text" else "Which letters are these?",
        f"What {word} is this?" if word != "text" else "What text is this?",
        f"What {word} is shown?" if word != "text" else "What word is shown?",
        f"What {word} do you see?" if word != "text" else "What letters do you see?",
        f"Which {word} is in the {p}?",
        f"Read the {word}.",
    ]
    if s.text:
        choices += [
            "What does it say?",
            f"What is written in the {p}?",
            "Read the text.",
            "What does this say?",
        ]
        if len(text) == 1 and text.isdigit():
            choices += ["What number is this?", "What number do you see?", "Which number is shown?"]
    return Turn("read", r.choice(choices), f"{text}.")


ASKERS: tuple[tuple[float, Callable[[Random, Scene], Turn | None]], ...] = (
    (3.0, _what),
    (2.0, _describe),
    (6.0, _count),
    (3.5, _color),
    (1.0, _colors),
    (3.5, _is_there),
    (1.5, _which_shape),
    (1.2, _background),
    (1.5, _where),
    (1.8, _relation),
    (1.0, _side),
    (1.0, _size),
    (1.0, _more),
    (4.0, _read),
)


def ask(random: Random, scene: Scene) -> Turn:
    """Returns a random question about the scene with its answer."""
    weights = [w for w, _ in ASKERS]
    while True:
        turn = random.choices(ASKERS, weights)[0][1](random, scene)
        if turn is not None:
            return turn


def ask_two(random: Random, first: Scene, second: Scene) -> Turn:
    """Returns a question about two pictures."""
    draw = random.random()
    p = random.choice(("picture", "picture", "image"))
    if draw < 0.4 and not first.text and not second.text:
        kind = random.choice([t.kind for t in (*first.things, *second.things)])
        if kind in KINDS:
            what = [noun(kind, 2)]
            counts = [sum(t.kind == kind for t in s.things) for s in (first, second)]
            if random.random() < 0.3:
                what, counts = ["shapes"], [len(s.things) for s in (first, second)]
            if counts[0] == counts[1]:
                answer = "Both have the same number."
            else:
                answer = f"The {'first' if counts[0] > counts[1] else 'second'} {p}."
            if all(t.kind in KINDS for s in (first, second) for t in s.things):
                return Turn("two pictures", f"Which {p} has more {what[0]}?", answer)
    which, scene = random.choice((("first", first), ("second", second)))
    if draw < 0.75:
        turn = ask(random, scene)
        if turn.kind in ("content", "describe", "read"):
            question = random.choice(
                (
                    f"What is in the {which} {p}?",
                    f"What does the {which} {p} show?",
                    f"Describe the {which} {p}.",
                )
            )
            return Turn("two pictures", question, sentence(content(scene)))
        question = f"In the {which} {p}, {turn.question[0].lower()}{turn.question[1:]}"
        return Turn("two pictures", question, turn.answer)
    question = random.choice(
        (
            f"What is in these {p}s?",
            f"Describe both {p}s.",
            f"What do the {p}s show?",
            f"Describe the two {p}s.",
        )
    )
    answer = f"The first shows {content(first)}, the second {content(second)}."
    return Turn("two pictures", question, answer)


ABOUT = (
    "I am a small model that looks at pictures of shapes, digits and letters. "
    "Ask me how many there are or which colors they have."
)
NO_PICTURE = "I do not see a picture. Please attach one."
HELLO = "Hello! Send me a picture and ask me what it shows."
CHAT = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hi there!",
            "Good morning",
            "Good evening!",
            "Hello there",
        ),
        HELLO,
    ),
    (
        (
            "What can you do?",
            "Who are you?",
            "What are you?",
            "Help",
            "Can you help me?",
            "What are you good at?",
            "Tell me about yourself.",
            "What is your name?",
            "How can you help me?",
            "What should I ask you?",
        ),
        ABOUT,
    ),
    (
        ("How are you?", "How are you doing?", "How is it going?"),
        "I am fine. Do you have a picture for me?",
    ),
    (
        ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much.", "Great, thanks!"),
        "You are welcome.",
    ),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you"), "Goodbye!"),
    (
        ("OK", "Ok", "Okay.", "Good.", "Great!", "Nice", "Cool", "Well done!"),
        "Do you have another question?",
    ),
    (
        (
            "What is the capital of France?",
            "Write a poem.",
            "Tell me a joke.",
            "Write a Python function.",
            "Who won the game?",
            "What is the weather today?",
            "Translate this to German.",
            "What time is it?",
            "Explain gravity.",
            "Why is the sky blue?",
            "Write a story about a dragon.",
            "What is 2 + 2?",
            "Summarize this text.",
            "Tell me something interesting.",
        ),
        "I do not know that. I only know about pictures of shapes, digits and letters.",
    ),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about pictures.",
    "Answer briefly.",
    "You are a vision model. Be concise.",
    "You answer questions about images. Answer in one short sentence and do not guess.",
    "Be brief.",
    "You are a friendly and careful assistant.",
)
WITHOUT = (
    "What is in the picture?",
    "Describe this image.",
    "How many circles are there?",
    "How many red shapes are in the picture?",
    "What do you see?",
    "What color is the square?",
    "Is there a star in the picture?",
    "Which digit is this?",
    "What does it say?",
    "Describe the picture.",
    "What is in this image?",
    "What color is the background?",
)


def chat(random: Random, seen: bool) -> Turn:
    """Returns a turn that needs no picture; `seen` is True if there was one before."""
    if not seen and random.random() < 0.35:
        return Turn("chat", random.choice(WITHOUT), NO_PICTURE)
    questions, answer = random.choice(CHAT)
    return Turn("chat", random.choice(questions), answer)


def blur_wording(random: Random, question: str) -> str:
    """Sometimes adds the sloppiness of people in a hurry."""
    draw = random.random()
    if draw < 0.06 and not any(c in question for c in '"'):
        question = question[0].lower() + question[1:]
        if draw < 0.03:
            question = question.rstrip("?.")
    elif draw < 0.09:
        question = question.rstrip("?.")
    elif draw < 0.11:
        opening = random.choice(("Please tell me: ", "Question: ", "Hi! ", "Look at this. "))
        question = opening + question
    return question
