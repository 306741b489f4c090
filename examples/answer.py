"""Load a checkpoint with transformers alone and let it answer a prompt.

usage: python examples/answer.py MODEL_FOLDER "PROMPT"
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, logging


def main(folder: str, prompt: str) -> str:
    """The greedy answer, with the chat template when the tokenizer has one."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"{sys.argv[2]}\n-> {main(sys.argv[1], sys.argv[2])}")
