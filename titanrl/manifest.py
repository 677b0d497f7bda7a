"""Print the objects of a run on Kubernetes as YAML: `titanrl manifest`.

`kubectl apply` of the output starts the run: Monarch's operator makes the pods of trainers and generators, and the controller's
Job finds them, trains, and deletes them.
"""

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from titanrl import terminal
from titanrl.config import Config, ConfigError
from titanrl.config.errors import BrokenRule
from titanrl.config.explain import explain_rule
from titanrl.config.load import validate
from titanrl.config.places import host_counts
from titanrl.config.source import Source, read_source
from titanrl.config.strict_yaml import dump
from titanrl.device import resolve_device
from titanrl.launch.kubernetes.manifest import Json, controller, mesh, mesh_name
from titanrl.launch.kubernetes.rules import broken_by_pods


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl manifest") -> None:
    """Check the configuration, and print the objects."""
    terminal.prepare()
    arguments = parse(argv, prog=prog)
    try:
        source = read_source(arguments.config, arguments.overrides)
        config = validate(source)
        check(config, source)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    text = dump(source.values)
    if arguments.doctor:
        printed = controller(config, text, namespace_of(config), examines=True)
    else:
        printed = objects(config, text, arguments.resume, arguments.only)
    print(text_of(printed), end="")


def parse(argv: Sequence[str] | None, *, prog: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Print the objects of a run on Kubernetes as YAML, for kubectl apply. Needs no cluster."
    )
    help_text = "YAML file of the run, or the name of a shipped configuration"
    parser.add_argument("--config", type=Path, required=True, help=help_text)
    help_text = "run directory in the pods; the run continues from its newest checkpoint"
    parser.add_argument("--resume", metavar="RUN_DIR", help=help_text)
    help_text = "print the pods of the hosts only, or the controller only, which then creates those pods itself"
    parser.add_argument("--only", choices=("meshes", "controller"), help=help_text)
    help_text = "print a controller that examines the hosts of the run, and does not train"
    parser.add_argument("--doctor", action="store_true", help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that replace those of the file")
    arguments = parser.parse_args(argv)
    if arguments.doctor and (arguments.resume or arguments.only):
        parser.error("--doctor and --resume or --only exclude each other")
    return arguments


def check(config: Config, source: Source) -> None:
    """Check what can be checked without the cluster, the image and its volumes.

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
    """Return the objects of a run: a MonarchMesh for each role, and those of the controller.

    Args:
        config: the run.
        text: its configuration as written, because relative paths are those of files in the pods.
        resume: run directory in the pods that the controller continues; None begins a new run.
        only: `meshes` or `controller`, to return these only.
    """
    device = resolve_device("auto").kind if config.device == "auto" else config.device
    namespace = namespace_of(config)
    token = secrets.token_hex(16)
    meshes = [
        mesh(config, device, role, mesh_name(config.name, role), token, namespace=namespace) for role in host_counts(config)
    ]
    others = controller(config, text, namespace, resume)
    return [*(meshes if only != "controller" else ()), *(others if only != "meshes" else ())]


def namespace_of(config: Config) -> str:
    """Return the namespace of the objects of a run."""
    return config.hosts.kubernetes.namespace or "default"


def text_of(manifest: Sequence[Json]) -> str:
    """Return objects as YAML documents, with texts of several lines as blocks."""
    return yaml.dump_all(manifest, Dumper=_Dumper, sort_keys=False, width=128)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


if __name__ == "__main__":
    main()
