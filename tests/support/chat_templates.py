"""Chat templates that we wrote, each as strict as those of a family of models.

They perform the same checks as the families' templates, and read the same fields without testing
that they exist. Their output is shorter.
"""

# ruff: noqa: E501  (lines of templates)

from __future__ import annotations

ALTERNATE = "{{ raise_exception('roles must alternate user/assistant') }}"
UNKNOWN = "{{ raise_exception('unknown role: ' + m.role) }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Templates that write calls and results in their own syntax.
WITH_TOOLS: dict[str, str] = {
    # The first template of Qwen 3, QwQ, Granite 3.3: contents are sliced and added.
    "sliced contents": TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content[:5] == '<tool' %}(result){% endif %}{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT,
    # Qwen 3: finds the user's last question, and splits off thinking.
    "qwen3": TOOLS + "{%- set ns = namespace(found=false) %}{%- for m in messages[::-1] %}"
    "{%- if m.role == 'user' and m.content is string and "
    "not m.content.startswith('<tool_response>') %}{%- set ns.found = true %}{%- endif %}"
    "{%- endfor %}{%- if not ns.found %}{{ raise_exception('No user query found.') }}{%- endif %}"
    "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n"
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ content.split('</think>')[-1] }}"
    '{%- for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{%- endfor %}<|im_end|>\n"
    "{%- elif m.role == 'tool' %}<tool_response>\n{{ content }}\n</tool_response>"
    "{%- elif loop.first %}<|im_start|>system\n{{ content }}<|im_end|>\n{%- endif %}{%- endfor %}"
    + PROMPT,
    # Hermes 2 and 3: concatenates a tool's name and description.
    "hermes": "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for name, p in t.function.parameters.properties.items() %}{{ name + p.type }}"
    "{{ p.description + '' }}{% endfor %}{% endfor %}"
    + CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}'
        "</tool_call>{% endfor %}",
    ),
    # Mistral 7B v0.3, Nemo: ids of nine letters and digits, alternating roles, no text beside
    # calls.
    "mistral v3": "{%- set ns = namespace(i=0) %}"
    "{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- for m in rest %}{%- if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.i % 2 == 0) %}" + ALTERNATE + "{%- endif %}"
    "{%- set ns.i = ns.i + 1 %}{%- endif %}{%- endfor %}{{ bos_token }}"
    "{%- for m in rest %}{%- if m.role == 'user' %}"
    "{%- if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "[INST]{{ (messages[0].content + '\n\n') if messages[0].role == 'system' and loop.last }}"
    "{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}[TOOL_CALLS][{%- for c in m.tool_calls %}"
    "{{ (c.function | tojson)[:-1] }}"
    "{%- if c.id is undefined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    ', "id": "{{ c.id }}"}{%- endfor %}]</s>'
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | string }}"
    "{%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ m.tool_call_id }}[/TOOL_RESULTS]{%- else %}" + UNKNOWN + "{%- endif %}{%- endfor %}",
    # Mistral Small 3: reads only the first text of a list.
    "mistral small": "{%- set given = messages[0].role == 'system' %}"
    "{%- if given %}[SYSTEM_PROMPT]{{ messages[0].content if messages[0].content is string else "
    "messages[0].content[0].text }}[/SYSTEM_PROMPT]{%- endif %}{%- set rest = messages[given:] %}"
    "{%- set turns = rest | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') | list %}"
    "{%- for m in turns %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + ALTERNATE
    + "{%- endif %}{%- endfor %}{%- for m in rest %}{%- if m.role == 'user' %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson if tools and loop.last }}[INST]"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for b in m.content %}"
    "{%- if b.type == 'text' %}{{ b.text }}{%- else %}"
    "{{ raise_exception('Only text and image blocks are supported') }}{%- endif %}{%- endfor %}"
    "{%- endif %}[/INST]{%- elif m.tool_calls %}[TOOL_CALLS]{%- for c in m.tool_calls %}"
    "{{ c.function | tojson }}{%- if c.id | length < 9 %}{{ raise_exception('short id') }}{%- endif %}"
    "{{ c.id[-9:] }}{%- endfor %}</s>{%- elif m.role == 'assistant' %}"
    "{{ m.content if m.content is string else m.content[0].text }}</s>"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | string }}{{ m.tool_call_id[-9:] }}"
    "[/TOOL_RESULTS]{%- else %}" + UNKNOWN + "{%- endif %}{%- endfor %}",
    # Llama 3.1 to 3.3: one call per message, only the first system message.
    "llama3": "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{{ system }}" + TOOLS + "<|eot_id|>"
    "{%- for m in messages %}{%- if not (m.role == 'ipython' or m.role == 'tool' or "
    "'tool_calls' in m) %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{%- elif 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|start_header_id|>ipython<|end_header_id|>\n\n{%- if m.content is mapping or "
    "m.content is iterable %}{{ m.content | tojson }}{%- else %}{{ m.content }}{%- endif %}<|eot_id|>"
    "{%- endif %}{%- endfor %}" + PROMPT,
    # Llama 4: the user's content may be a list, and calls are Python.
    "llama4": TOOLS + "{%- for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for p in m.content %}"
    "{%- if p.type == 'text' %}{{ p.text | trim }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if m.tool_calls %}<|python_start|>[{%- for c in m.tool_calls %}{{ c.function.name }}("
    "{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{%- endfor %})"
    "{%- endfor %}]<|python_end|>{%- endif %}<|eot|>{%- endfor %}" + PROMPT,
    # DeepSeek V3 and R1: a message has calls if its content is none; concatenates arguments as text.
    "deepseek v3": "{%- set ns = namespace(system='') %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{%- set ns.system = ns.system + m['content'] %}{%- endif %}"
    "{%- endfor %}{{ bos_token }}{{ ns.system }}{%- for m in messages %}"
    "{%- if m['role'] == 'user' %}<|User|>{{ m['content'] }}{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is none %}<|Assistant|><|calls|>"
    "{%- for c in m['tool_calls'] %}{{ c['type'] + '<|sep|>' + c['function']['name'] + '\n```json\n' "
    "+ c['function']['arguments'] + '\n```' }}{%- endfor %}<|end|>{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
    "{%- set content = m['content'].split('</think>')[-1] %}<|Assistant|>{{ content }}<|end|>"
    "{%- endif %}{%- if m['role'] == 'tool' %}<|output|>{{ m['content'] }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|Assistant|>{%- endif %}",
    # DeepSeek R1: calls, then the content of the same message unless it is none.
    "deepseek r1": "{{ bos_token }}{%- for m in messages %}{%- if m['role'] == 'system' %}"
    "{{ m['content'] }}{%- elif m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{%- elif m['role'] == 'assistant' %}{%- for c in m['tool_calls'] or [] %}<|Assistant|>"
    "{{ c['function']['name'] + '\n```json\n' + c['function']['arguments'] + '\n```' }}{%- endfor %}"
    "{%- if m['content'] is not none %}{%- set content = m['content'] %}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "<|Assistant|>{{ content + '<|end|>' }}{%- endif %}"
    "{%- elif m['role'] == 'tool' %}<|output|>{{ m['content'] }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|Assistant|>{%- endif %}",
    # DeepSeek V3.1: one loop; arguments may be text or objects.
    "deepseek v3.1": "{%- for m in messages %}{%- if m['role'] == 'system' %}{{ m['content'] }}"
    "{%- elif m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{%- elif m['role'] == 'assistant' %}<|Assistant|></think>{%- if m['content'] %}{{ m['content'] }}"
    "{%- endif %}{%- if m['tool_calls'] is defined and m['tool_calls'] is not none %}"
    "{%- for c in m['tool_calls'] %}<|call|>{{ c['function']['name'] + '<|sep|>' + "
    "c['function']['arguments'] }}{%- endfor %}{%- endif %}<|end|>"
    "{%- elif m['role'] == 'tool' %}<|output|>{{ m['content'] }}{%- endif %}{%- endfor %}",
    # gpt-oss: either text or thinking with a single call; results get their name from the call.
    "gpt-oss": "{%- if tools %}<|start|>developer<|message|>{%- for t in tools %}"
    "{{ '// ' + t.function.description + '\ntype ' + t.function.name }}{%- endfor %}<|end|>{%- endif %}"
    "{%- set last = namespace(name=none) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- if 'content' in m and "
    "('<|channel|>final<|message|>' in m.content) %}{{ raise_exception('channel tags') }}{%- endif %}"
    "{%- if 'tool_calls' in m %}{%- if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking with tool calls!') }}{%- endif %}"
    "{%- if m.content or m.thinking %}<|channel|>analysis<|message|>{{ m.content or m.thinking }}"
    "<|end|>{%- endif %}{%- set c = m.tool_calls[0].function %}{%- set last.name = c.name %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{%- else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{%- set last.name = none %}{%- endif %}"
    "{%- elif m.role == 'tool' %}{%- if last.name is none %}"
    "{{ raise_exception('Message has tool role, but there was no previous call!') }}{%- endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{%- elif loop.first %}<|start|>developer<|message|>{{ m.content }}<|end|>"
    "{%- else %}{{ raise_exception('unknown role') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}",
    # Kimi K2: identifies calls only by their ids, which contain the name.
    "kimi k2": TOOLS
    + "{%- macro show(c) %}{%- if c is string %}{{ c }}{%- else %}{%- for p in c %}{{ p.text }}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
    "{%- for m in messages %}<|im_{{ m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>"
    "{%- if m.role == 'assistant' and m.get('tool_calls') %}{%- if m.content %}{{ show(m.content) }}"
    "{%- endif %}<|calls|>{%- for c in m['tool_calls'] %}<|call|>{{ c['id'] }}<|args|>"
    "{%- if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}{%- else %}"
    "{{ c['function']['arguments'] | tojson }}{%- endif %}{%- endfor %}<|calls_end|>"
    "{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ show(m.content) }}"
    "{%- else %}{{ show(m.content) }}{%- endif %}<|im_end|>{%- endfor %}" + PROMPT,
    # Parses the name out of an id.
    "ids with names": TOOLS
    + "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{%- for c in m.tool_calls or [] %}"
    "{{ c.id.split('.')[1].split(':')[0] }}{{ c.function.arguments | tojson }}{%- endfor %}"
    "{%- if m.role == 'tool' %}{{ m.tool_call_id.split('.')[1].split(':')[0] }}{%- endif %}"
    "{%- endfor %}" + PROMPT,
    # Numeric ids.
    "ids of digits": TOOLS
    + "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{%- for c in m.tool_calls or [] %}"
    "{%- if c.id | int(-1) < 0 %}{{ raise_exception('ids must be numbers') }}{%- endif %}"
    "{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor %}{%- endfor %}"
    + PROMPT,
    # GLM 4.5: iterates over arguments; contents pass through a macro.
    "glm": "{%- macro text(c) %}{%- if c is string %}{{ c }}{%- elif c is iterable and c is not "
    "mapping %}{%- for p in c %}{{ p.text if p is mapping else p }}{%- endfor %}{%- else %}"
    "{{ c }}{%- endif %}{%- endmacro %}"
    + TOOLS
    + "{%- for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ text(m.content) }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>{%- if m.reasoning_content is string %}"
    "\n<think>{{ m.reasoning_content.strip() }}</think>{%- endif %}"
    "{%- if text(m.content).strip() %}\n{{ text(m.content).strip() }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{%- for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{%- endfor %}</tool_call>{%- endfor %}"
    "{%- elif m.role == 'tool' %}<|observation|>{{ m.content if m.content is string else "
    "m.content[0].text }}{%- elif m.role == 'system' %}<|system|>\n{{ text(m.content) }}"
    "{%- endif %}{%- endfor %}" + PROMPT,
    # Qwen3-Coder, MiniMax M2: arguments must be a mapping; a result requires a call.
    "qwen3 coder": "{%- for t in tools or [] %}<name>{{ t.function.name }}</name><description>"
    "{{ t.function.description | trim }}</description>{%- for k, v in "
    "t.function.parameters.properties | items %}{{ k }}{{ v.type | string }}{%- endfor %}"
    "{%- endfor %}{%- set ns = namespace(called=false) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- if m.content is defined and m.content is string and "
    "m.content | trim | length > 0 %}{{ m.content | trim }}{%- endif %}"
    "{%- set ns.called = ns.called or m.tool_calls is defined %}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{%- for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>"
    "{%- endfor %}</function>\n</tool_call>{%- endfor %}"
    "{%- elif m.role == 'tool' %}{%- if not ns.called %}{{ raise_exception('no previous call') }}"
    "{%- endif %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{%- endif %}{%- endfor %}"
    + PROMPT,
    # Granite 3, Phi-4-mini: everything except calls is a role with a text.
    "granite": TOOLS
    + "{%- for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "{%- if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}"
    "{%- endif %}<|end_of_text|>\n{%- endfor %}" + PROMPT,
    # Apriel: would print an object in Python's notation.
    "apriel": TOOLS + "{%- for m in messages %}{%- if m.role == 'assistant' %}<|assistant|>\n"
    "{%- if m.content is defined and m.content is not none and m.content | length > 0 %}"
    "{{ m.content if m.content is string else m.content[0].text }}{%- endif %}"
    '{%- for c in m.tool_calls or [] %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + '
    "c.function.arguments | string + ', \"id\": \"' + c.id + '\"}' }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}<|tool_result|>\n{{ m.content if m.content is string else "
    "m.content[0].text }}{%- elif m.role in ('user', 'system') %}<|{{ m.role }}|>\n"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for p in m.content %}"
    "{%- if p.type == 'text' %}{{ p.text }}{%- else %}{{ raise_exception('Unrecognized type') }}"
    "{%- endif %}{%- endfor %}{%- endif %}{%- endif %}<|end|>\n{%- endfor %}" + PROMPT,
    # FunctionGemma, Gemma 4: results include their tool's name; types are upper case.
    "gemma tools": "{%- for t in tools or [] %}declaration:{{ t.function.name }}{description:"
    "{{ t.function.description + '' }},{%- for k, v in t.function.parameters.properties | dictsort %}"
    "{{ k }}:{{ v.type | upper }}{{ v.description + '' }}{%- endfor %}{%- endfor %}"
    "{%- if messages[0].role in ('system', 'developer') %}<start_of_turn>developer\n"
    "{{ messages[0].content | trim }}<end_of_turn>\n{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{%- if m.role == 'tool' %}{%- if not m.name %}{{ raise_exception('a tool needs a name') }}"
    "{%- endif %}response:{{ m.name }}{value:{{ m.content }}}"
    "{%- elif role in ('user', 'model') %}<start_of_turn>{{ role }}\n"
    "{%- if m.content is string %}{{ m.content | trim }}{%- else %}{%- for p in m.content %}"
    "{{ p.text | trim }}{%- endfor %}{%- endif %}{%- for c in m.tool_calls or [] %}"
    "call:{{ c.function.name }}{{ '{' }}{%- for k, v in c.function.arguments | dictsort %}{{ k }}:"
    "{{ v }}{%- endfor %}{{ '}' }}{%- endfor %}<end_of_turn>\n"
    "{%- else %}" + UNKNOWN + "{%- endif %}{%- endfor %}" + PROMPT,
    # Command R7B: the text beside calls is a plan; ignores later system messages.
    "command": "{%- if messages[0].role == 'system' %}{%- set s = messages[0].content %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set s = '' %}{%- endif %}<|SYSTEM|>{{ s }}"
    + TOOLS
    + "{%- for m in messages %}{%- if m.role | lower == 'user' %}<|USER|>{{ m.content }}"
    "{%- elif m.role | lower == 'assistant' %}<|CHATBOT|>{%- if m.tool_calls %}<|START_THINKING|>"
    "{{ m.tool_plan or m.content }}<|END_THINKING|><|START_ACTION|>[{%- for c in m.tool_calls %}"
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{%- endfor %}]<|END_ACTION|>{%- else %}'
    "{{ m.content }}{%- endif %}{%- elif m.role | lower == 'tool' %}<|TOOL_RESULT|>"
    "{{ m.content | tojson }}{%- endif %}{%- endfor %}<|CHATBOT|>",
    # A message with calls needs a content, possibly empty, and a result must follow.
    "contents everywhere": TOOLS
    + "{%- for m in messages %}{%- if m.content is undefined or m.content is none %}"
    "{{ raise_exception('a message must have content') }}{%- endif %}"
    "<|{{ m.role }}|>{{ m.content }}{%- for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{%- endfor %}{%- endfor %}" + PROMPT,
    # LFM2, SmolVLM: every message has a list of parts.
    "lists only, with tools": TOOLS
    + "{%- for m in messages %}<|{{ m.role }}|>{%- for p in m.content or [] %}{{ p['text'] }}"
    "{%- endfor %}{%- for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{%- endfor %}{%- endfor %}" + PROMPT,
}

#: Templates without support for tools.
WITHOUT_TOOLS: dict[str, str] = {
    "chatml": CHATML,
    # Llama 2: a system message inside the user's first message, alternating roles.
    "llama2": "{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}"
    "{%- set system = messages[0]['content'] %}{%- else %}{%- set rest = messages %}"
    "{%- set system = false %}{%- endif %}{%- for m in rest %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}" + ALTERNATE + "{%- endif %}"
    "{%- if loop.index0 == 0 and system %}{%- set content = '<<SYS>>' + system + '<</SYS>>' + "
    "m['content'] %}{%- else %}{%- set content = m['content'] %}{%- endif %}"
    "{{ '[INST] ' + content.strip() + ' [/INST]' if m['role'] == 'user' else content.strip() }}"
    "{%- endfor %}",
    # Gemma 2: rejects system messages.
    "gemma2": "{%- if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{%- endif %}{%- for m in messages %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}" + ALTERNATE + "{%- endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{%- endfor %}" + PROMPT,
    # Gemma 3: contents are strings or lists, and nothing else.
    "gemma3": "{%- if messages[0].role == 'system' %}{%- set s = messages[0].content if "
    "messages[0].content is string else messages[0].content[0].text %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set s = '' %}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + ALTERNATE
    + "{%- endif %}<start_of_turn>{{ m.role }}\n{{ s if loop.first }}{%- if m.content is string %}"
    "{{ m.content | trim }}{%- elif m.content is iterable %}{%- for p in m.content %}"
    "{%- if p.type == 'text' %}{{ p.text | trim }}{%- endif %}{%- endfor %}{%- else %}"
    "{{ raise_exception('Invalid content type') }}{%- endif %}<end_of_turn>\n{%- endfor %}"
    + PROMPT,
    # Phi-3, Zephyr: ignores unknown roles.
    "passed over": "{%- for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'system' and loop.first %}<|system|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    + PROMPT,
    # OLMo, Baichuan: raises on unknown roles.
    "two roles": "{%- for m in messages %}{%- if m.role == 'user' %}<u>{{ m.content + '\n' }}"
    "{%- elif m.role == 'assistant' %}<a>{{ m.content + '\n' }}{%- else %}"
    + UNKNOWN
    + "{%- endif %}{%- endfor %}",
    # LLaVA, SmolVLM: only lists of parts.
    "lists only": "{%- for m in messages %}{{ m.role }}:{%- if m.content[0].type == 'image' %}<i>"
    "{%- endif %}{%- for p in m.content %}{%- if p.type == 'text' %}{{ p.text }}{%- endif %}"
    "{%- endfor %}\n{%- endfor %}" + PROMPT,
    # Lists for the user, strings for system and assistant.
    "lists of the user": "{%- for m in messages %}{%- if m.role == 'user' %}<u>"
    "{%- for p in m.content %}{{ p['text'] }}{%- endfor %}{%- else %}<{{ m.role }}>"
    "{{ m.content + '' }}{%- endif %}{%- endfor %}" + PROMPT,
    # Moves the system message to the front from any place; allows one.
    "one system message": "{%- set s = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{%- if s | length > 1 %}{{ raise_exception('one system message') }}{%- endif %}"
    "{{ s[0].content if s }}{%- for m in messages %}{%- if m.role != 'system' %}<{{ m.role }}>"
    "{{ m.content }}{%- endif %}{%- endfor %}" + PROMPT,
}

TEMPLATES: dict[str, str] = {**WITH_TOOLS, **WITHOUT_TOOLS}
