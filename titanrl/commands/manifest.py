"""Print the Kubernetes objects of a run as YAML: `titanrl manifest`.

Passing the output to `kubectl apply` starts the run. Monarch's operator creates the pods of trainers and generators. The
controller's Job discovers them, trains, and deletes them.
"""

import argparse
import secrets
from collections.abc import Sequence

import yaml

from titanrl.base import terminal
from titanrl.config import Config, ConfigError
from titanrl.config.device import device_kind
from titanrl.config.errors import BrokenRule, refusing
from titanrl.config.load import explain_rule, validate
from titanrl.config.sizes import host_counts
from titanrl.config.source import Source, dump, read_source
from titanrl.hosts.kubernetes import Json, broken_by_pods, controller, mesh, mesh_name


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl manifest") -> None:
    """Check the configuration, and print the objects."""
    terminal.prepare()
    arguments = parse(argv, prog=prog)
    with refusing():
        source = read_source(arguments.config, arguments.overrides)
        config = validate(source)
        check(config, source)
    text = dump(source.values)
    if arguments.doctor:
        printed = controller(config, text, namespace_of(config), examines=True)
    else:
        printed = objects(config, text, arguments.resume, arguments.only)
    print(text_of(printed), end="")


def parse(argv: Sequence[str] | None, *, prog: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Print the Kubernetes objects of a run as YAML, for kubectl apply. No cluster is needed."
    )
    help_text = "YAML file of the run, or the name of a shipped configuration"
    parser.add_argument("--config", type=terminal.path, required=True, help=help_text)
    help_text = "run directory in the pods, to continue from its newest checkpoint"
    parser.add_argument("--resume", metavar="RUN_DIR", help=help_text)
    help_text = "print only the pods of the hosts, or only the controller, which then creates those pods itself"
    parser.add_argument("--only", choices=("meshes", "controller"), help=help_text)
    help_text = "print a controller that checks the hosts of the run instead of training"
    parser.add_argument("--doctor", action="store_true", help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the file's")
    arguments = parser.parse_args(argv)
    if arguments.doctor and (arguments.resume or arguments.only):
        parser.error("--doctor cannot be combined with --resume or --only")
    return arguments


def check(config: Config, source: Source) -> None:
    """Check everything that does not require access to the cluster, the image or the volumes.

    Raises:
        ConfigError: The run cannot start.
    """
    if config.hosts.kind != "kubernetes":
        values = {"hosts.kind": config.hosts.kind}
        broken = [BrokenRule(values=values, rule="titanrl manifest needs pods", fix="set hosts.kind to kubernetes")]
    else:
        broken = list(broken_by_pods(config))
    if broken:
        raise ConfigError("\n".join(explain_rule(rule, source) for rule in broken))


def objects(config: Config, text: str, resume: str | None = None, only: str | None = None) -> list[Json]:
    """Return the Kubernetes objects of a run: one MonarchMesh per role, and the controller's objects.

    `text` is the configuration as written; its relative paths, and `resume`, refer to files in the pods.
    """
    device = device_kind(config.device)
    namespace = namespace_of(config)
    token = secrets.token_hex(16)
    meshes = [
        mesh(config, device, role, mesh_name(config.name, role), token, namespace=namespace) for role in host_counts(config)
    ]
    others = controller(config, text, namespace, resume)
    return [*(meshes if only != "controller" else ()), *(others if only != "meshes" else ())]


def namespace_of(config: Config) -> str:
    """Return the Kubernetes namespace of a run."""
    return config.hosts.kubernetes.namespace or "default"


def text_of(manifest: Sequence[Json]) -> str:
    """Return objects as YAML documents, with multi-line strings as literal blocks."""
    return yaml.dump_all(manifest, Dumper=_Dumper, sort_keys=False, width=128)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes multi-line strings as literal blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
