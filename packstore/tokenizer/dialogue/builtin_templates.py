"""Chat templates for tokenizers that bring none."""

_SYSTEM = r"""{%- if messages and messages[0].role in ('system', 'developer') %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- if tools %}
    {%- set ns = namespace(text='You can call these functions:') %}
    {%- for tool in tools %}
        {%- set ns.text = ns.text + '\n' + (tool | tojson) %}
    {%- endfor %}
    {%- set system = (system + '\n\n' if system else '') + ns.text %}
{%- endif %}
{%- macro body(message) %}
    {%- if message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
        {%- set name, arguments = call.function.name | tojson, call.function.arguments %}
        {%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
        {{- '<tool_call>\n{"name": ' + name + ', "arguments": ' + (arguments or '{}') }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""

_CHATML = r"""{%- macro turn(role, text) %}
    {{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}
{%- endmacro %}
{%- if system %}{{ turn('system', system) }}{% endif %}
{%- for message in rest %}{{ turn(message.role, body(message)) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_PLAIN = r"""{%- if system %}{{ 'System: ' + system }}{% endif %}
{%- for message in rest %}
    {%- if system or not loop.first %}{{ '\n\n' }}{% endif %}
    {{- message.role | capitalize + ': ' + body(message) }}
    {%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if system or rest %}{{ '\n\n' }}{% endif %}
    {{- 'Assistant:' }}
{%- endif %}
"""

BUILTIN = {"chatml": _SYSTEM + _CHATML, "plain": _SYSTEM + _PLAIN}
"""Name -> template. ``chatml`` marks turns; ``plain`` writes names and ends answers with EOS."""
