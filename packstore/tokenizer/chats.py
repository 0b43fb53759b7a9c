"""From the messages of a record to texts: the chat template, and the turns that are supervised."""

from __future__ import annotations

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.sequences import Draft
from packstore.tokenizer.shapes import Parsed
from packstore.tokenizer.template import ChatTemplate, Message, Tools
from packstore.tokenizer.tokenizer import Tokenizer
from packstore.tokenizer.turns import render_turns


def draft_messages(
    parsed: Parsed, tokenizer: Tokenizer, config: TokenizeConfig, guard: str
) -> tuple[list[Draft], list[str]]:
    """The sequences of a record of messages, and events to note.

    Raises:
        Refused: the template refuses the record, or no turn is supervised.
        TokenizerError: there is no chat template.
    """
    template = tokenizer.template
    if template is None:
        raise TokenizerError(
            sentence(
                f"tokenizer {tokenizer.name}",
                "chat messages need a chat template",
                "none",
                "Set chat_template: a Jinja file, chatml or plain",
            )
        )
    prompt: list[Message] = list(parsed.prompt)  # type: ignore[arg-type]
    drafts: list[Draft] = []
    events: list[str] = []
    written = template.written_prompt
    prompts: dict[int, str] = {}
    for response in parsed.responses:
        messages = [*prompt, *response]
        prompts = {n: text for n, text in prompts.items() if n == len(prompt)}
        text, spans = render_turns(
            template,
            messages,
            len(prompt),
            parsed.tools,
            last_only=config.supervised_turns == "last",
            prompts=prompts,
        )
        if written and text.endswith(written):
            events.append("generation_prompt_always")
            if config.append_eos:  # it follows the answer
                text = text.removesuffix(written)
        keeps = config.overlong == "truncate_prompt"
        drafts.append(
            Draft(
                text=text,
                spans=spans,
                mode="guarded" if guard else "control",
                guard=guard,
                system_end=_system_end(template, messages, parsed.tools, text) if keeps else 0,
                from_template=True,
            )
        )
    return drafts, events


def _system_end(template: ChatTemplate, messages: list[Message], tools: Tools, text: str) -> int:
    if messages[0]["role"] not in ("system", "developer"):
        return 0
    try:
        system = template.render(messages[:1], tools).removesuffix(template.written_prompt)
    except Refused:  # many templates refuse a dialogue without a user
        return 0
    return len(system) if text.startswith(system) else 0
