"""Chat templates of unknown families, each with its own syntax of calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Invented:
    """A chat template of an unknown family.

    Attributes:
        name: Name of the test.
        calls: Jinja that renders `calls`, each a function with `name`, `arguments` and `id`.
        kind: Kind of the syntax that should be derived.
        tokens: Added tokens of its model.
        text: Jinja that renders `content`.
        prompt: Text after the header of the assistant's turn, in prompts.
        reasoning: Jinja that renders `reasoning`.
        markers: Start and end of the reasoning that should be derived.
        has_parallel: True if it renders more than one call.
        has_ids: True if it renders ids.
    """

    name: str
    calls: str
    kind: str
    tokens: tuple[str, ...] = ()
    text: str = "{{ content }}"
    prompt: str = ""
    reasoning: str = ""
    markers: tuple[str, str] | None = None
    has_parallel: bool = True
    has_ids: bool = False

    @property
    def source(self) -> str:
        """The whole template."""
        refuse = "{% if calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
        return "".join(
            [
                "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n",
                "{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}",
                "{% for message in messages %}<|im_start|>{{ message.role }}\n",
                "{% set content = message.content or '' %}",
                "{% set reasoning = message.reasoning_content %}",
                "{% if message.tool_calls %}{% set calls = message.tool_calls %}",
                "" if self.has_parallel else refuse,
                f"{{% if reasoning %}}{self.reasoning}{{% endif %}}",
                f"{{% if content %}}{self.text}{{% endif %}}{self.calls}",
                "{% elif message.role == 'assistant' %}",
                f"{{% if reasoning %}}{self.reasoning}{{% endif %}}{self.text}",
                "{% else %}{{ content }}{% endif %}<|im_end|>\n{% endfor %}",
                "{% if add_generation_prompt %}<|im_start|>assistant\n",
                f"{self.prompt}{{% endif %}}",
            ]
        )


def _each(call: str, between: str = "") -> str:
    """Jinja for every call; its function is `f`."""
    separator = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for call in calls %}}{{% set f = call.function %}}{call}{separator}{{% endfor %}}"


def _parameters(one: str) -> str:
    """Jinja for every parameter; `k` is its name and `v` its value as text."""
    return (
        "{% for k, value in f.arguments | items %}"
        "{% set v = value if value is string else value | tojson %}" + one + "{% endfor %}"
    )


JSON = "{{ f.arguments | tojson }}"
TEMPLATES = (
    Invented(
        "attributes",
        _each(
            '<call function="{{ f.name }}">'
            + _parameters('<arg name="{{ k }}">{{ v }}</arg>')
            + "</call>",
            "\n",
        ),
        "tagged",
    ),
    Invented(
        "typed_parameters",
        "<run>\n"
        + _each(
            "<do {{ f.name }}>\n"
            + _parameters(
                '<set {{ k }} as="{{ "text" if value is string else "json" }}">{{ v }}</set>\n'
            )
            + "</do>\n"
        )
        + "</run>",
        "tagged",
    ),
    Invented(
        "parameters_on_lines",
        _each(
            "<|call|>{{ f.name }}\n"
            + _parameters("<|key|>{{ k }}\n{{ v }}\n<|/key|>\n")
            + "<|/call|>"
        ),
        "tagged",
        tokens=("<|call|>", "<|/call|>", "<|key|>", "<|/key|>", "<|im_end|>"),
    ),
    Invented(
        "elements",
        _each(
            "<use_tool>\n<{{ f.name }}>\n"
            + _parameters("<{{ k }}>{{ v }}</{{ k }}>\n")
            + "</{{ f.name }}>\n</use_tool>\n"
        ),
        "tagged",
    ),
    Invented(
        "identified_parameters",
        "<|calls|>"
        + _each(
            "<|call|>{{ call.id }}|{{ f.name }}"
            + _parameters("<|key|>{{ k }}<|value|>{{ v }}<|/value|>")
            + "<|/call|>"
        )
        + "<|/calls|>",
        "tagged",
        tokens=(
            *("<|calls|>", "<|call|>", "<|key|>", "<|value|>", "<|/value|>", "<|/call|>"),
            *("<|/calls|>", "<|im_end|>"),
        ),
        has_ids=True,
    ),
    Invented(
        "json_parameters",
        _each(
            '<invoke tool="{{ f.name }}">\n'
            "{% for k, v in f.arguments | items %}"
            '<param name="{{ k }}">{{ v | tojson }}</param>\n{% endfor %}'
            "</invoke>\n"
        ),
        "tagged",
    ),
    Invented(
        "parameters_of_types",
        _each(
            '<tool_use name="{{ f.name }}">\n'
            + _parameters(
                '<p name="{{ k }}" type="{{ "string" if value is string else "boolean" if value is '
                'boolean else "number" if value is number else "json" }}">{{ v }}</p>\n'
            )
            + "</tool_use>\n"
        ),
        "tagged",
    ),
    Invented(
        "attributes_of_one_tag",
        _each(
            "<do what='{{ f.name }}'>"
            + _parameters("<with key='{{ k }}' value='{{ v }}'/>")
            + "</do>"
        ),
        "tagged",
    ),
    Invented(
        "json_list",
        "«tools»["
        + _each('{"name": "{{ f.name }}", "parameters": ' + JSON + "}", ", ")
        + "]«/tools»",
        "json",
    ),
    Invented(
        "unusual_keys",
        _each(
            '<|tool|>{"ref": "{{ call.id }}", "do": {"fn": "{{ f.name }}", "kwargs": '
            + JSON
            + "}}<|/tool|>"
        ),
        "json",
        tokens=("<|tool|>", "<|/tool|>", "<|im_end|>"),
        has_ids=True,
    ),
    Invented(
        "arguments_as_text",
        _each(
            '<api>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson | tojson }}}</api>',
            "\n",
        ),
        "json",
    ),
    Invented(
        "indented",
        "Action:\n```json\n"
        + _each(
            '{\n  "tool": "{{ f.name }}",\n  "input": {{ f.arguments | tojson(indent=2) }}\n}', "\n"
        )
        + "\n```",
        "json",
    ),
    Invented(
        "bare_objects",
        _each(
            '{"tool":"{{ f.name }}","input":{{ f.arguments | tojson(separators=(",", ":")) }}}',
            "\n",
        ),
        "json",
    ),
    Invented(
        "name_outside",
        _each("<fn>{{ f.name }}</fn><args>" + JSON + "</args>", "\n"),
        "named",
    ),
    Invented(
        "name_at_both_ends",
        _each("<<{{ f.name }}>>" + JSON + "<</{{ f.name }}>>", "\n"),
        "named",
    ),
    Invented(
        "name_is_key",
        "<|fns|>[" + _each('{"{{ f.name }}": ' + JSON + "}", ", ") + "]<|/fns|>",
        "named",
        tokens=("<|fns|>", "<|/fns|>", "<|im_end|>"),
    ),
    Invented(
        "special_tokens",
        "<|acts|>" + _each("<|act|>{{ f.name }}<|with|>" + JSON + "<|done|>") + "<|/acts|>",
        "named",
        tokens=("<|acts|>", "<|act|>", "<|with|>", "<|done|>", "<|/acts|>", "<|im_end|>"),
    ),
    Invented(
        "identified",
        "<calls>\n"
        + _each('<call id="{{ call.id }}" name="{{ f.name }}">' + JSON + "</call>\n")
        + "</calls>",
        "named",
        has_ids=True,
    ),
    Invented(
        "counted",
        _each("⟦tool⟧{{ loop.index0 }} {{ f.name }}⟦args⟧" + JSON + "⟦/tool⟧"),
        "named",
    ),
    Invented(
        "lines",
        _each("Action: {{ f.name }}\nAction Input: " + JSON, "\n"),
        "named",
    ),
    Invented(
        "one_call",
        _each("<|invoke|>{{ f.name }}\n" + JSON),
        "named",
        tokens=("<|invoke|>", "<|im_end|>"),
        has_parallel=False,
    ),
    Invented(
        "functions",
        _each(
            "<run>{{ f.name }}(" + "{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})</run>",
            "\n",
        ),
        "python",
    ),
    Invented(
        "list_of_functions",
        "◁calls▷["
        + _each(
            "{{ f.name }}(" + "{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
        )
        + "]◁/calls▷",
        "python",
    ),
    Invented(
        "pondering",
        _each('<tool>{"name": "{{ f.name }}", "arguments": ' + JSON + "}</tool>", "\n"),
        "json",
        text="<say>{{ content }}</say>",
        reasoning="<ponder>\n{{ reasoning }}\n</ponder>\n\n",
        markers=("<ponder>", "</ponder>"),
        prompt="<ponder>\n",
    ),
    Invented(
        "musing",
        _each("<|do|>{{ f.name }}" + JSON + "<|od|>"),
        "named",
        tokens=("<|do|>", "<|od|>", "<|muse|>", "<|sum|>", "<|im_end|>"),
        reasoning="<|muse|>{{ reasoning }}<|sum|>",
        markers=("<|muse|>", "<|sum|>"),
    ),
    Invented(
        "fenced",
        _each('```tool_call\n{"name": "{{ f.name }}", "arguments": ' + JSON + "}\n```\n"),
        "json",
    ),
    Invented(
        "object_of_calls",
        '{"tool_calls": ['
        + _each(
            '{"id": "{{ call.id }}", "call": {"arguments": ' + JSON + ', "name": "{{ f.name }}"}}',
            ", ",
        )
        + "]}",
        "json",
        has_ids=True,
    ),
    Invented(
        "whole_calls",
        "<|calls|>" + _each("{{ call | tojson }}", "\n") + "<|/calls|>",
        "json",
        tokens=("<|calls|>", "<|/calls|>", "<|im_end|>"),
        has_ids=True,
    ),
    Invented(
        "invocations",
        "<function_calls>\n"
        + _each(
            '<invoke name="{{ f.name }}">\n'
            + _parameters('<parameter name="{{ k }}">{{ v }}</parameter>\n')
            + "</invoke>\n"
        )
        + "</function_calls>",
        "tagged",
    ),
    Invented(
        "function_of_an_object",
        _each("@call {{ f.name }}(" + JSON + ")", "\n"),
        "named",
    ),
    Invented(
        "words_around_text",
        "[CALLS]" + _each("{{ f.name }} := " + JSON, " ;; ") + "[/CALLS]",
        "named",
        text="<answer>\n{{ content }}\n</answer>\n",
    ),
)
