"""Chat with a trained policy: `titanrl chat RUN_DIR`.

transformers loads the policy from the run's Hugging Face export, so it behaves as in any other program.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titanrl.config import Config, ConfigError, load_config
from titanrl.metrics.run_directory import read_lines
from titanrl.packages import installed_version


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.chat") -> None:
    """Complete one prompt per line until end of input."""
    parser = argparse.ArgumentParser(prog=prog, description="Chat with a trained policy.")
    parser.add_argument("run_dir", type=Path, help="directory of a finished run")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    arguments = parser.parse_args(argv)
    model_dir = arguments.run_dir / "checkpoints" / "final"
    if not (model_dir / "config.json").is_file():
        parser.exit(2, f"RUN_DIR: checkpoints/final has no trained model (got {arguments.run_dir}). Name a finished run.\n")
    if installed_version("torch") is None:
        parser.exit(2, "torch: the package is not installed. Install the required packages: titanrl doctor --install\n")
    try:
        config = load_config(arguments.run_dir / "config.yaml")
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    complete = load_policy(model_dir, config, arguments.temperature)
    rollouts = arguments.run_dir / "rollouts.jsonl"  # a fine-tuning has none
    example = next(read_lines(rollouts), None) if rollouts.is_file() else None
    if example is not None:
        print(f"The policy was trained on prompts like this one: {example['prompt']}")
    for prompt in read_prompts():
        try:
            print(complete(prompt))
        except ValueError as error:
            print(error, file=sys.stderr)


def read_prompts() -> Iterator[str]:
    """Yield the non-empty lines of standard input until end of file or Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            line = input("> " if sys.stdin.isatty() else "").strip()
            if line:
                yield line
    except (EOFError, KeyboardInterrupt):
        return


def load_policy(model_dir: Path, config: Config, temperature: float) -> Callable[[str], str]:
    """Return a function that maps a prompt to the policy's completion."""
    import torch
    import transformers

    from titanrl.data.streams import make_encoder
    from titanrl.data.tokenizer import load_tokenizer

    transformers.logging.disable_progress_bar()
    tokenizer = load_tokenizer(model_dir)
    encode = make_encoder(config.data, tokenizer)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}

    def complete(prompt: str) -> str:
        input_ids = torch.tensor([encode(prompt)])
        output = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=config.rollout.max_new_tokens, **sampling
        )
        return tokenizer.decode(output[0, input_ids.shape[1] :].tolist())

    return complete


if __name__ == "__main__":
    main()
