"""Chat with a trained policy: `titanrl chat RUN_DIR`.

transformers loads the policy from the run's Hugging Face export, so it behaves as in any other program.
"""

import argparse
import io
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titanrl.base import terminal
from titanrl.base.errors import describe
from titanrl.base.files import why_no_file, why_no_folder
from titanrl.config import Config, ConfigError, load_config
from titanrl.config.device import installed_version
from titanrl.config.errors import refusing
from titanrl.metrics.reading import RunRecord
from titanrl.models.directory import open_model


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.chat") -> None:
    """Complete one prompt per line until end of input."""
    terminal.prepare()
    parser = argparse.ArgumentParser(prog=prog, description="Chat with a trained policy.")
    parser.add_argument("run_dir", type=terminal.path, help="directory of a finished run")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    arguments = parser.parse_args(argv)
    if not 0.0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature: must be a finite number >= 0 (got {arguments.temperature}). Give one such as 0.7.")
    model_dir = arguments.run_dir / "checkpoints" / "final"
    with refusing():
        if found := why_no_folder(arguments.run_dir):
            raise ConfigError(f"RUN_DIR: it {found} (got {arguments.run_dir}). Give the directory of a finished run.")
        if why_no_file(model_dir / "config.json"):
            raise ConfigError(
                f"RUN_DIR: checkpoints/final has no trained model (got {arguments.run_dir}). "
                "Give the directory of a finished run."
            )
        if installed_version("torch") is None:
            raise ConfigError("torch: the package is not installed. Install the required packages: titanrl doctor --install")
        config = load_config(arguments.run_dir / "config.yaml")
        try:
            open_model(model_dir, config.model.family).weight_files()
        except ValueError as error:
            raise ConfigError(f"RUN_DIR: {error}") from None
    try:
        with terminal.announcing("loading the policy"):
            complete = load_policy(model_dir, config, arguments.temperature)
    except Exception as error:  # transformers and safetensors raise anything for a damaged model
        print(f"error: {describe(error)}. The model is in {model_dir}", file=sys.stderr)
        sys.exit(1)
    example = RunRecord(arguments.run_dir).first_group()
    if example is not None:  # a fine-tuning has none
        print(f"The policy was trained on prompts like this one: {example.prompt}")
    for prompt in read_prompts():
        try:
            print(complete(prompt))
        except ValueError as error:
            print(error, file=sys.stderr)


def read_prompts() -> Iterator[str]:
    """Yield the non-empty lines of standard input until end of file or Ctrl-C."""
    if sys.stdin is None:  # closed
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
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
    encode, rollout = make_encoder(config.data, tokenizer), config.rollout
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}

    def complete(prompt: str) -> str:
        input_ids = torch.tensor([encode({"question": prompt})])
        num_prompt = input_ids.shape[1]

        def completes_stop(sequences: Any, scores: Any, **options: Any) -> Any:
            ends = tokenizer.completes_stop(sequences[0, num_prompt:].tolist(), rollout.stop_texts)
            return torch.full((1,), ends, dtype=torch.bool)

        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=rollout.max_new_tokens,
            eos_token_id=[*tokenizer.stop_ids, *rollout.stop_ids],
            stopping_criteria=[completes_stop] if rollout.stop_texts else None,
            **sampling,
        )
        return tokenizer.decode_completion(output[0, num_prompt:].tolist(), rollout.stop, keep_stop=rollout.keep_stop)

    return complete


if __name__ == "__main__":
    main()
