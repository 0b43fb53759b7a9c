"""A prompt and the answer to learn, with context, earlier rounds and thoughts if there
are any.
"""

from __future__ import annotations

from typing import Any

from packstore.tokenizer.records.forms import Fields, form
from packstore.tokenizer.records.forms.helpers import (
    as_turns,
    first_present,
    join_texts,
    rounds_as_messages,
    with_reasoning,
)
from packstore.tokenizer.records.reading import Chat
from packstore.tokenizer.records.types import (
    answer,
    anything,
    prompt,
    question,
    rounds,
    text,
    texts,
    thoughts,
)
from packstore.tokenizer.refusals import wrong_type

OWN_NAMES = (
    "messages",
    "conversations",
    "chosen",
    "chosen_response",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "responses",
    "completions",
    "input_ids",
)
"""Packstore's own names: a record that has one of them is read by it."""

BESIDE = {
    "history": rounds,
    "reasoning": thoughts,
    "reasoning_content": thoughts,
    "thinking": thoughts,
}
"""Fields that may stand beside any prompt with its answer."""

AFTER_INSTRUCTION = {**BESIDE, "input": text, "context": text}
BEFORE_QUESTION = {**BESIDE, "context": text, "article": text}


def read_answer(fields: Fields, prompt: Any, response: Any) -> Chat:
    """Return a prompt with its answer, and with the fields that stand beside them."""
    history = fields.get("history")
    reasoning = first_present(fields, "reasoning", "reasoning_content", "thinking")
    if reasoning:
        prompt = as_turns(prompt, "user")
        response = with_reasoning(reasoning, response)
    if history:
        earlier = rounds_as_messages(history)
        messages = [
            *earlier,
            *as_turns(prompt, "user"),
            *as_turns(response, "assistant"),
        ]
        return Chat(messages=messages)
    return Chat(prompt=prompt, response=response)


@form(
    "sft",
    {"instruction": text, "output": text},
    optional=AFTER_INSTRUCTION,
    without=(*OWN_NAMES, "candidates", "orig_instruction"),
    leaves=("text", "prompt", "category", "reasoning_chains"),
    as_chat=True,
    sets=(
        "tatsu-lab/alpaca",
        "yahma/alpaca-cleaned",
        "vicgalle/alpaca-gpt4",
        "sahil2801/CodeAlpaca-20k",
        "SkunkworksAI/reasoning-0.01",
        "PJMixers-Dev/cognitivecomputations_dolphin-r1-reasoning",
    ),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
)
@form(
    "sft",
    {"instruction": text, "response": text},
    optional=AFTER_INSTRUCTION,
    without=(*OWN_NAMES, "prompt"),
    leaves=("category",),
    as_chat=True,
    sets=("databricks/databricks-dolly-15k", "openbmb/UltraInteract_sft"),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
@form(
    "sft",
    {"instruction": text, "answer": text},
    optional=AFTER_INSTRUCTION,
    without=(*OWN_NAMES, "prompt"),
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
def alpaca(fields: Fields) -> Chat:
    """An instruction, with its input or context on the next line, and the
    answer to it.
    """
    instruction = join_texts(
        fields["instruction"], fields.get("input"), fields.get("context")
    )
    response = first_present(fields, "output", "response", "answer")
    return read_answer(fields, instruction, response)


@form(
    "sft",
    {"instruction": text, "instances[].output": texts},
    optional={"instances[].input": texts},
    without=(*OWN_NAMES, "prompt", "output"),
    leaves=("name", "is_classification"),
    as_chat=True,
    source="https://github.com/tatsu-lab/stanford_alpaca/blob/main/seed_tasks.jsonl",
)
def alpaca_seed_tasks(fields: Fields) -> Chat:
    """An instruction with one instance: its input on the next line, and the output to
    it.
    """
    outputs = fields["instances[].output"]
    inputs = fields.get("instances[].input", [""])
    if len(outputs) != 1:
        raise wrong_type("a task must have one instance", outputs)
    return Chat(prompt=join_texts(fields["instruction"], *inputs), response=outputs[0])


@form(
    "sft",
    {"question": text, "answer": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    leaves=("orig_question", "source", "index", "category"),
    as_chat=True,
    sets=("openai/gsm8k", "TIGER-Lab/WebInstructSub", "b-mc2/sql-create-context"),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
@form(
    "sft",
    {"question": text, "response": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    as_chat=True,
    sets=("Open-Orca/OpenOrca", "Attention1115/DLR-Web"),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/dataset_info.json",
)
@form(
    "sft",
    {"question": text, "completion": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    as_chat=True,
    source="https://github.com/modelscope/ms-swift/blob/main/swift/llm/dataset/preprocessor/core.py",
)
@form(
    "sft",
    {"query": text, "response": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    leaves=("type", "original_question"),
    as_chat=True,
    sets=("meta-math/MetaMathQA",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/llm/dataset/preprocessor/core.py",
)
@form(
    "sft",
    {"query": text, "answer": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    leaves=("resource", "lang"),
    as_chat=True,
    sets=("m-a-p/CodeFeedback-Filtered-Instruction",),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/codefeedback_mix.py",
)
@form(
    "sft",
    {"prompt": text, "answer": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "response", "completion", "instruction", "question", "query"),
    as_chat=True,
    source="https://github.com/modelscope/ms-swift/blob/main/swift/llm/dataset/preprocessor/core.py",
)
@form(
    "sft",
    {"prompt": text, "generation": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "response", "completion", "instruction", "question", "query"),
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
@form(
    "sft",
    {"Question": text, "Answer": text},
    optional=BEFORE_QUESTION,
    without=(*OWN_NAMES, "prompt"),
    leaves=("qtype",),
    as_chat=True,
    sets=("keivalya/MedQuad-MedicalQnADataset",),
    source="https://huggingface.co/datasets/keivalya/MedQuad-MedicalQnADataset",
)
@form(
    "sft",
    {"INSTRUCTION": text, "RESPONSE": text},
    optional=BEFORE_QUESTION,
    leaves=("SOURCE", "METADATA"),
    as_chat=True,
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
@form(
    "sft",
    {"message_1": text, "message_2": text},
    optional=BEFORE_QUESTION,
    leaves=("role_1", "topic;", "sub_topic"),
    as_chat=True,
    sets=("camel-ai/math", "camel-ai/physics"),
    source="https://github.com/axolotl-ai-cloud/axolotl/blob/main/docs/dataset-formats/inst_tune.qmd",
)
@form(
    "sft",
    {"sql_prompt": text, "sql_context": text, "sql": text},
    leaves=("domain*", "sql_*"),
    as_chat=True,
    sets=("gretelai/synthetic_text_to_sql",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/dataset/llm.py",
)
def question_answer(fields: Fields) -> Chat:
    """A question, with its context or article on the line before, and the
    answer to it.
    """
    question_text = first_present(
        fields,
        "question",
        "query",
        "prompt",
        "Question",
        "INSTRUCTION",
        "message_1",
        "sql_prompt",
    )
    context = first_present(fields, "context", "article", "sql_context")
    response = first_present(
        fields,
        "answer",
        "response",
        "completion",
        "generation",
        "Answer",
        "RESPONSE",
        "message_2",
        "sql",
    )
    return read_answer(fields, join_texts(context, question_text), response)


@form(
    "sft",
    {"problem": text, "solution": text},
    optional=BESIDE,
    without=(*OWN_NAMES, "prompt", "response", "generations", "steps"),
    leaves=(
        "answer",
        "lang",
        "level",
        "problem_is_valid",
        "problem_type",
        "question_type",
        "seed",
        "solution_is_valid",
        "subject",
        "type",
    ),
    as_chat=True,
    sets=(
        "DigitalLearningGmbH/MATH-lighteval",
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
        "AI-MO/NuminaMath-1.5",
    ),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/data/dataset_info.json",
)
@form(
    "sft",
    {"Problem": text, "Solution": text},
    optional=BESIDE,
    without=OWN_NAMES,
    leaves=("Answer",),
    as_chat=True,
    sets=("Maxwell-Jia/AIME_2024",),
    source="https://huggingface.co/datasets/Maxwell-Jia/AIME_2024",
)
@form(
    "sft",
    {"question": text, "solution": text, "answer": text},
    optional=BESIDE,
    without=(*OWN_NAMES, "prompt", "response"),
    as_chat=True,
    sets=("GAIR/LIMO", "GAIR/LIMO-v2"),
    source="https://huggingface.co/datasets/GAIR/LIMO",
)
@form(
    "sft",
    {"problem": text, "generated_solution": text},
    optional=BESIDE,
    without=(*OWN_NAMES, "prompt", "response"),
    leaves=("problem_type", "pass_rate_72b_tir", "inference_mode", "used_in_kaggle"),
    as_chat=True,
    sets=("nvidia/OpenMathInstruct-2", "nvidia/OpenMathReasoning"),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/open_math_instruct.py",
)
@form(
    "sft",
    {"problem": text, "solution": text, "reannotated_assistant_content": text},
    without=(*OWN_NAMES, "reannotated_messages"),
    leaves=("quality_metrics", "verified"),
    as_chat=True,
    sets=("ServiceNow-AI/R1-Distill-SFT",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/data/dataset_info.json",
)
@form(
    "sft",
    {"question": text, "chain": text, "result": text},
    without=(*OWN_NAMES, "prompt", "answer", "response"),
    leaves=("result_float",),
    as_chat=True,
    sets=("MU-NLPC/Calc-gsm8k", "MU-NLPC/Calc-ape210k"),
    source="https://github.com/microsoft/agent-lightning/blob/main/examples/calc_x/README.md",
)
def problem_solution(fields: Fields) -> Chat:
    """A problem and its solution; a final answer beside them is left, as the solution
    ends so.
    """
    problem = first_present(fields, "problem", "Problem", "question")
    solution = first_present(
        fields,
        "reannotated_assistant_content",
        "generated_solution",
        "solution",
        "Solution",
        "chain",
    )
    return read_answer(fields, problem, solution)


@form(
    "sft",
    {"input": prompt, "output": answer},
    optional=BESIDE,
    without=(*OWN_NAMES, "prompt", "instruction", "question", "query", "problem"),
    leaves=("category", "license", "generator", "used_in_training", "version"),
    as_chat=True,
    sets=("nvidia/Llama-Nemotron-Post-Training-Dataset",),
    source="https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/datasets/sft_dataset.py",
)
@form(
    "sft",
    {"input": prompt, "target": text},
    optional=BESIDE,
    without=(*OWN_NAMES, "prompt", "instruction", "question", "query", "problem"),
    leaves=("kind",),
    as_chat=True,
    sets=("YeungNLP/firefly-train-1.1M",),
    source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/dataset_info.json",
)
@form(
    "sft",
    {"inputs": text, "targets": text},
    optional={**BESIDE, "definition": text},
    without=(*OWN_NAMES, "prompt", "instruction", "question", "query", "problem"),
    leaves=(
        "annotation_type",
        "language",
        "language_code",
        "script",
        "sub_dataset_name",
        "task_name",
    ),
    as_chat=True,
    sets=(
        "CohereForAI/aya_dataset",
        "CohereForAI/aya_collection",
        "Muennighoff/natural-instructions",
    ),
    source="https://github.com/allenai/open-instruct/blob/main/scripts/data/sft/aya.py",
)
def input_output(fields: Fields) -> Chat:
    """An input, with the definition of its task on the line before, and the output to
    it.
    """
    task_input = first_present(fields, "input", "inputs")
    output = first_present(fields, "output", "target", "targets")
    if "definition" in fields:
        task_input = join_texts(fields["definition"], task_input)
    return read_answer(fields, task_input, output)


@form(
    "sft",
    {"prompt": prompt, "reasoning": thoughts, "response": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://docs.vllm.ai/en/v0.11.2/features/reasoning_outputs/",
)
@form(
    "sft",
    {"prompt": prompt, "reasoning": thoughts, "completion": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://docs.vllm.ai/en/v0.11.2/features/reasoning_outputs/",
)
@form(
    "sft",
    {"prompt": prompt, "reasoning_content": thoughts, "response": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://docs.vllm.ai/en/v0.11.2/features/reasoning_outputs/",
)
@form(
    "sft",
    {"prompt": prompt, "reasoning_content": thoughts, "completion": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://docs.vllm.ai/en/v0.11.2/features/reasoning_outputs/",
)
@form(
    "sft",
    {"prompt": prompt, "thinking": thoughts, "response": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://huggingface.co/datasets/PJMixers-Dev/cognitivecomputations_dolphin-r1-reasoning",
)
@form(
    "sft",
    {"prompt": prompt, "thinking": thoughts, "completion": answer},
    optional=BESIDE,
    without=OWN_NAMES,
    as_chat=True,
    source="https://huggingface.co/datasets/PJMixers-Dev/cognitivecomputations_dolphin-r1-reasoning",
)
def prompt_reasoning_response(fields: Fields) -> Chat:
    """A prompt, the thoughts of the model, and the response; the thoughts are
    learned.
    """
    return read_answer(
        fields, fields["prompt"], first_present(fields, "response", "completion")
    )


@form(
    "sft",
    {"messages": question, "reasoning": thoughts, "answer": text},
    without=("response", "chosen"),
    as_chat=True,
    sets=("cognitivecomputations/dolphin-r1",),
    source="https://github.com/marin-community/marin/blob/main/experiments/posttrain/instruction_datasets.py",
)
@form(
    "sft",
    {"question": text, "deepseek_thinking_trajectory": text, "deepseek_attempt": text},
    leaves=("solution", "cot_type", "source_type", "gemini_*", "deepseek_grade*"),
    as_chat=True,
    sets=("simplescaling/s1K-1.1",),
    source="https://github.com/ContextualAI/HALOs/blob/main/train/data.py",
)
@form(
    "sft",
    {"question": text, "model_reasoning": text, "model_answer": text},
    leaves=("reference_answer", "verifier_*", "task"),
    as_chat=True,
    sets=("GeneralReasoning/GeneralThought-195K",),
    source="https://github.com/marin-community/marin/blob/main/experiments/posttrain/instruction_datasets.py",
)
@form(
    "sft",
    {"problem": text, "deepseek_reasoning": text, "deepseek_solution": text},
    leaves=("ground_truth_solution", "test_cases", "starter_code", "domain"),
    as_chat=True,
    sets=("open-thoughts/OpenThoughts-114k",),
    source="https://huggingface.co/datasets/open-thoughts/OpenThoughts-114k",
)
@form(
    "sft",
    {"Question": text, "Complex_CoT": text, "Response": text},
    as_chat=True,
    sets=("FreedomIntelligence/medical-o1-reasoning-SFT",),
    source="https://github.com/huggingface/trl/blob/main/docs/source/sft_trainer.md",
)
@form(
    "sft",
    {"input": text, "reasoning_content": text, "content": text},
    leaves=("repo_name",),
    as_chat=True,
    sets=("Congliu/Chinese-DeepSeek-R1-Distill-data-110k",),
    source="https://huggingface.co/datasets/Congliu/Chinese-DeepSeek-R1-Distill-data-110k",
)
@form(
    "sft",
    {"user": text, "reasoning": text, "assistant": text},
    as_chat=True,
    sets=("KingNish/reasoning-base-20k",),
    source="https://huggingface.co/datasets/KingNish/reasoning-base-20k",
)
def reasoning_and_answer(fields: Fields) -> Chat:
    """A question, the thoughts of the model, and the answer; the thoughts are
    learned.
    """
    question_turns = first_present(
        fields, "messages", "question", "problem", "Question", "input", "user"
    )
    reasoning = first_present(
        fields,
        "reasoning",
        "deepseek_thinking_trajectory",
        "model_reasoning",
        "deepseek_reasoning",
        "Complex_CoT",
        "reasoning_content",
    )
    response = first_present(
        fields,
        "answer",
        "deepseek_attempt",
        "model_answer",
        "deepseek_solution",
        "Response",
        "content",
        "assistant",
    )
    return read_answer({**fields, "reasoning": reasoning}, question_turns, response)


@form(
    "sft",
    {"query": text, "answers": text, "tools": anything},
    as_chat=True,
    sets=("Salesforce/xlam-function-calling-60k",),
    source="https://github.com/modelscope/ms-swift/blob/main/swift/dataset/dataset/llm.py",
)
def xlam(fields: Fields) -> Chat:
    """A question, the tools for it, and the calls that answer it, as JSON text."""
    return Chat(
        prompt=as_turns(fields["query"], "user"),
        response=as_turns(fields["answers"], "function_call"),
        tools=fields["tools"],
    )
