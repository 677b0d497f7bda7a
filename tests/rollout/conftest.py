"""A tokenizer shared by all tests of the folder, and scoring pools shared by those of a module."""

from collections.abc import Iterator

import pytest

from tests.rollout.scoring import CARELESS, CARELESS_VERIFIER, Bench
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The quick start's tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def careless_verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make `careless_verifier` importable."""
    folder = tmp_path_factory.mktemp("scorers")
    (folder / "careless_verifier.py").write_text(CARELESS_VERIFIER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def careless(careless_verifier: None) -> Iterator[Bench]:
    """A pool that scores with `careless_verifier`."""
    bench = Bench(CARELESS)
    yield bench
    bench.close()
