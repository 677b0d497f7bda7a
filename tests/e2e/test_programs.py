"""A run whose episodes are played by a program with OpenAI's official client, on the real engine and trainer."""

import pytest

from tests.e2e.conftest import REPO, Finished, Start
from tests.e2e.test_agents import check_first_version
from titanrl.carriers.dumps import DumpReader

TWICE = '''
import openai


async def play(task):
    """Ask twice at the same time, then continue one of the replies in a stream; the last message counts."""
    async with openai.AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        create = client.chat.completions.create
        messages = [{"role": "user", "content": task.question}]
        both = await create(model=task.model, messages=messages, n=2)
        messages += [both.choices[0].message, {"role": "user", "content": task.question}]
        stream = await create(model=task.model, messages=messages, stream=True)
        async for _ in stream:
            pass
'''


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_program_trains_on_the_tokens_of_the_engine(
    start_run: Start, plain_run: Finished, tmp_path_factory: pytest.TempPathFactory, max_staleness: int
) -> None:
    folder = tmp_path_factory.mktemp("program")
    (folder / "twice.py").write_text(TWICE)
    run = start_run(
        f"program_{max_staleness}",
        *plain_run.as_start,
        f"data.environment={{program: '{folder}/twice.py:play', renderer: plain, max_turns: 3}}",
        "trainer.row_tokens=256",
        "rollout.groups_per_step=2",
        "evaluation.num_prompts=4",
        f"max_staleness={max_staleness}",
        "trainer.share_prompts=true",
        f"rollout.save={folder}/dump",
        "num_steps=2",
    ).finish()
    assert run.code == 0, run.output
    saved = DumpReader(folder / "dump")
    rollouts = [rollout for place in range(saved.num_groups) for rollout in saved.group(place).rollouts]
    assert len(rollouts) == 2 * 16
    for rollout in rollouts[:16]:
        assert (len(rollout.segments), len(rollout.turns)) == (2, 3)
        assert rollout.turns[-1].reward == rollout.reward
    check_first_version(plain_run.run_dir / "checkpoints/final", rollouts[:16], at_least=2 * 16)
    for step in run.steps:
        assert step["mismatch/logprob_abs_max"] < 1e-4 or max_staleness, "the trainer sees the tokens that were sampled"
        assert (step["environment/calls_mean"], step["environment/segments_mean"]) == (3.0, 2.0)
        assert step["environment/overridden_calls_mean"] == 0.0


@pytest.mark.slow
def test_held_out_score_of_a_program_rises(start_run: Start, plain_run: Finished) -> None:
    run = start_run(
        "program_rises",
        "warm_start.num_steps=470",
        "warm_start.num_long_only_steps=415",
        f"data.environment={{program: '{REPO}/examples/agents/sums.py:play', renderer: plain, max_turns: 1}}",
        "evaluation.num_prompts=200",
        "evaluation.every_steps=20",
        "num_steps=60",
    ).finish()
    assert run.code == 0, run.output
    scores = run.evaluations()
    assert scores[-1] >= scores[0] + 0.3
