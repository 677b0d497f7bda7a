"""Caches that libraries import or unpickle, such as compiled kernels: only this user and root may be able to write them.

Most libraries create them below the home folder, and torch in the system's temporary folder, under a name that another user can
take first. `secure` runs before the packages are imported. The processes of a run inherit the variables that it sets.
"""

import getpass
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from titanrl.base.ownership import ALLOW, claim_folder, flaw, is_only_user, is_private
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.processes.templates import SHARED
from titanrl.processes.temporary import TemporaryFolder

logger = logging.getLogger(__name__)

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of torch's compile cache, whose entries are pickles and libraries."""
CACHES: Mapping[str, str] = {
    "XDG_CACHE_HOME": "{HOME}/.cache",
    "XDG_CONFIG_HOME": "{HOME}/.config",
    INDUCTOR: "{TMPDIR}/torchinductor_{USER}",
    "TRITON_CACHE_DIR": "{TRITON_HOME}/.triton/cache",
    "TORCH_EXTENSIONS_DIR": "{XDG_CACHE_HOME}/torch_extensions",
    "TORCH_HOME": "{XDG_CACHE_HOME}/torch",
    "PYTORCH_KERNEL_CACHE_PATH": "{XDG_CACHE_HOME}/torch/kernels",
    "VLLM_CACHE_ROOT": "{XDG_CACHE_HOME}/vllm",
    "VLLM_CONFIG_ROOT": "{XDG_CONFIG_HOME}/vllm",
    "HF_MODULES_CACHE": "{HF_HOME}/modules",
    "FLASHINFER_WORKSPACE_BASE": "{HOME}/.cache/flashinfer",
    "TVM_FFI_CACHE_DIR": "{HOME}/.cache/tvm-ffi",
    "NUMBA_CACHE_DIR": "{XDG_CACHE_HOME}/numba",
    "MPLCONFIGDIR": "{XDG_CONFIG_HOME}/matplotlib",
    "CUDA_CACHE_PATH": "{HOME}/.nv/ComputeCache",
    "PYTHONPYCACHEPREFIX": "",
}
"""Variables of the caches, and the library's default; empty if it has none. Defaults name variables and their defaults.

`HF_HOME` itself is not among them: models and data in it are read as safetensors, Arrow and JSON.
"""
_BASES = {"HF_HOME": "{XDG_CACHE_HOME}/huggingface", "TRITON_HOME": "{HOME}"}


def secure() -> None:
    """Make this process and those that inherit its environment use only caches that no other user can write.

    A cache that the environment names must be safe. The default of a library is replaced where it is not, by a folder that is
    deleted when this process exits. Modules are not imported from a working directory that others can write, unless it is on
    this process's path.

    Raises:
        ConfigError: Another user could change the temporary folder, or a cache that the environment names.
    """
    if is_only_user():
        os.environ.setdefault(INDUCTOR, str(_default(INDUCTOR)))
        return
    if broken := list(broken_rules()):
        raise ConfigError(*map(str, broken))  # environment variables have no line in the configuration
    replaced, folder = list[str](), None
    for name in CACHES:
        path = _default(name)
        if os.environ.get(name) or path is None:
            continue
        if found := _flaw(path):
            folder = folder or TemporaryFolder()
            own = folder.path / name.lower()
            own.mkdir(mode=0o700)
            os.environ[name] = str(own)
            replaced.append(f"{name}: {found}")
        elif name == INDUCTOR:  # its default would follow TMPDIR, which is another folder in each run
            os.environ[name] = str(path)
    if replaced:
        logger.warning("These caches are deleted at the end, because other users could change their usual folders: %s. To keep "
                       "them, set the variables to folders that only you can write.", "; ".join(replaced))  # fmt: skip
    with suppress(FileNotFoundError):  # the working directory was deleted
        if flaw(Path.cwd()) and not {"", os.getcwd()} & set(sys.path):
            os.environ.setdefault("PYTHONSAFEPATH", "1")


def broken_rules() -> Iterator[BrokenRule]:
    """Yield the variables whose folder another user could change."""
    fix = f"; if you are the only user of this machine or container, set {ALLOW}=1"
    temporary = tempfile.gettempdir()
    if found := flaw(Path(temporary), is_shared=True):
        rule = f"other users must not be able to replace files in the temporary folder ({found})"
        yield BrokenRule({"TMPDIR": temporary}, rule, f"set TMPDIR to a folder that only you can write{fix}")
    for name in CACHES:
        value, folder = os.environ.get(name), folder_of(name)
        if value and folder is not None and (found := _flaw(folder)):
            rule = f"only you may be able to write this cache, because programs are loaded from it ({found})"
            yield BrokenRule({name: value}, rule, f"unset {name}, or set it to a folder of yours{fix}")


def broken_by_templates() -> Iterator[BrokenRule]:
    """Check that no other user has created the folder of the shared templates, for example after they ended.

    Templates receive the environment of a run, with its keys, and its output.
    """
    folder = os.environ.get(SHARED)
    if folder and os.path.lexists(folder) and not is_private(Path(folder)):
        rule = "must be a folder of mode 0700 that belongs to you, and no link, because templates in it receive your keys"
        yield BrokenRule({SHARED: folder}, rule, "unset the variable, or start `titanrl warm` and export what it prints")


def folder_of(name: str) -> Path | None:
    """Return the folder of a cache in this environment; None if it is neither set nor has a default."""
    value = os.environ.get(name)
    return Path(value).expanduser() if value else _default(name)


def _flaw(path: Path) -> str:
    """Return the flaw of a folder. If it does not exist and another user could create it, create it first."""
    return flaw(path) and claim_folder(path)


def _default(name: str) -> Path | None:
    """Return the folder that a library uses if the variable is not set; None if it has no default."""
    default = CACHES[name]
    return Path(_expanded(default)) if default else None


def _expanded(text: str) -> str:
    """Return the text with the values of the variables that it names."""

    def value(match: re.Match[str]) -> str:
        match name := match[1]:
            case "HOME":
                return os.path.expanduser("~")
            case "TMPDIR":
                return tempfile.gettempdir()
            case "USER":  # as torch names its cache
                try:
                    user = getpass.getuser()
                except (KeyError, OSError):  # the user id has no name, as in some containers
                    user = f"uid_{os.getuid()}"
                return re.sub(r'[\\/:*?"<>|]', "_", user)
        return os.path.expanduser(os.environ.get(name) or _expanded({**CACHES, **_BASES}[name]))

    return re.sub(r"\{(\w+)\}", value, text)
