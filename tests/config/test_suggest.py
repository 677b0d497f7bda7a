"""Suggestions for unknown values: only what was probably meant."""

import pytest

from titanrl.config.load import did_you_mean, json_schema, nearest_keys, sections, suggestions

LOSSES = ("ppo", "importance_sampling", "reinforce", "gspo", "cispo", "dro", "sapo")


@pytest.mark.parametrize(
    ("name", "names", "question"),
    [
        ("GSPO", LOSSES, "did you mean gspo?"),
        ("importance-sampling", LOSSES, "did you mean importance_sampling?"),
        ("importance_samping", LOSSES, "did you mean importance_sampling?"),
        ("cipso", LOSSES, "did you mean cispo?"),
        ("reinforce++", ("reinforce_pp", "rloo"), "did you mean reinforce_pp?"),
        ("cuda:0", ("cpu", "cuda"), "did you mean cuda?"),
        ("gpu", ("cpu", "cuda", "npu"), "did you mean cuda?"),
        ("math", ("exact", "math_verify"), "did you mean math_verify?"),
        ("exact_match", ("exact", "math_verify"), "did you mean exact?"),
        ("tensorboardx", ("tensorboard", "wandb"), "did you mean tensorboard?"),
        ("bf16", ("float32", "bfloat16"), "did you mean bfloat16?"),
        ("clip", ("clip_low", "clip_high"), "did you mean clip_low or clip_high?"),
        ("a", ("a_1", "a_2", "a_3"), "did you mean a_1, a_2 or a_3?"),
        ("a", ("a_1", "a_2", "a_3", "a_4"), ""),
        ("grpo", LOSSES, ""),
        ("dapo", LOSSES, ""),
        ("float16", ("float32", "bfloat16"), ""),
        ("float64", ("float32", "bfloat16"), ""),
        ("mps", ("cpu", "cuda", "npu"), ""),
        ("x" * 10_000, LOSSES, ""),
        ("", LOSSES, ""),
    ],
)
def test_suggestion_is_what_was_probably_meant(name: str, names: tuple[str, ...], question: str) -> None:
    assert did_you_mean(name, names) == question


def test_keys_of_sections_in_a_list_are_suggested() -> None:
    assert nearest_keys(("hosts", "kubernetes", "volumes", 0, "meunt_path")) == ["hosts.kubernetes.volumes[0].mount_path"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.parallelism.cpp", ["trainer.parallelism.cp"]),
        ("trainer.parallelism.ddp", ["trainer.parallelism.dp_replicate", "trainer.parallelism.dp_shard"]),
        ("distill.teacher.ulr", ["distill.teacher.url"]),
        ("distill.teacher.ur", ["distill.teacher.url"]),
        ("distill.teacher.uri", []),  # another letter may be another word
        ("trainer.parallelism.pp", []),
        ("sf", ["sft"]),
    ],
)
def test_typos_of_short_keys_are_recognized(key: str, meant: list[str]) -> None:
    assert nearest_keys(key.split(".")) == meant


def test_every_choice_is_found_in_other_spellings() -> None:
    choices = [node["enum"] for node in json_schema()["$defs"].values() if "enum" in node]
    nodes = [node for section in sections() for node in section.keys.values()]
    choices += [option["enum"] for node in nodes for option in (node, *node.get("anyOf", ())) if "enum" in option]
    for names in choices:
        for name in map(str, names):
            assert suggestions(name.upper().replace("_", "-"), list(map(str, names))) == [name]
