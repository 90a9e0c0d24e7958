"""The options of `legato serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from legato_engine.config import LATENCY_POLICIES, EngineConfig

from legato_service.arguments import engine as of_engine
from legato_service.arguments import service as of_service
from legato_service.arguments import values
from legato_service.config import ServiceConfig, check


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage, whose many lines would hide the message."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(arguments: Sequence[str] | None = None) -> ServiceConfig:
    """Exit with code 2 when the options are invalid."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    given["affinity"] = given["affinity"] == "on"
    config = ServiceConfig(
        engine=EngineConfig(**{name: given[name] for name in _fields(EngineConfig, given)}),
        **{name: given[name] for name in _fields(ServiceConfig, given)},
    )
    try:
        check(config)
    except ValueError as error:
        parser.error(str(error))
    return config


def _fields(kind: type[EngineConfig] | type[ServiceConfig], given: dict[str, object]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name in given]


def make_parser() -> argparse.ArgumentParser:
    """No abbreviations: `legato` must see which options were typed."""
    parser = _Parser(
        prog="legato serve",
        description="Serve a vision-language model over gRPC.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    engine, service = EngineConfig(), ServiceConfig()
    of_service.add_listeners(parser.add_argument, service)
    of_service.add_access(parser.add_argument, service)
    of_engine.add_model(parser, engine, service)
    of_engine.add_adapters(parser.add_argument, engine)
    of_engine.add_queue(parser.add_argument, engine)
    of_service.add_limits(parser.add_argument, engine, service)
    of_service.add_telemetry(parser.add_argument, service)
    of_engine.add_null(parser, engine)
    parser.add_argument(
        "--latency-policy",
        choices=LATENCY_POLICIES,
        default=engine.latency_policy,
        help="low-latency: spend CPU time to respond sooner (busy polling); shared: leave cores to "
        "other threads; auto: low-latency with 8 or more cores, else shared",
    )
    parser.add_argument(
        "--crash-folder",
        metavar="FOLDER",
        default=engine.crash_folder,
        help="where an engine that died leaves a crash bundle; by default legato-crashes-UID in "
        "the temporary folder",
    )
    parser.add_argument(
        "--crash-bundles",
        metavar="N",
        type=values.whole,
        default=engine.crash_bundles,
        help="newest crash bundles that are kept; 0: none is written",
    )
    parser.add_argument("--log-level", choices=of_service.LOG_LEVELS, default=service.log_level)
    return parser
