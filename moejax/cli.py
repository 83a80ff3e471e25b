"""The command line: train, show, plan, doctor."""

import sys

from rich.console import Console
from rich.markup import escape

from moejax.config.errors import ConfigError

USAGE = """moejax train CONFIG [--field value ...]    train from a config file
moejax show CONFIG [--field value ...]     print the resolved plan without touching a device; --devices N if the config does not pretend any;
                                           --memory: what each layer keeps for its backward pass
moejax plan CONFIG --target h200x8 [...]   compile the train step for GPUs that are not there; print bytes, kernels and collectives
moejax doctor                              what this machine can run, and what is missing

Every field of the config is an option: --mesh.expert 4, --model.moe.num_experts 32, --optim.kind muon; `moejax show CONFIG --help` lists them."""


def main(args: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0 well, 1 the run did not reach its goal, 2 wrong arguments or config."""
    args = list(sys.argv[1:] if args is None else args)
    console = Console()
    if not args or args[0] in ("-h", "--help", "help") or args[1:] in (["-h"], ["--help"]):
        console.print(USAGE, highlight=False, markup=False)
        return 0 if args else 2
    command, *rest = args
    try:
        if command == "doctor" and not rest:
            return doctor(console)
        if command in ("train", "show", "plan") and rest and not rest[0].startswith("-"):
            return {"train": train, "show": show, "plan": plan}[command](console, rest[0], rest[1:])
    except ConfigError as error:
        Console(stderr=True).print(f"[bold red]config error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        if "moejax.parallel.watch" in sys.modules:
            sys.modules["moejax.parallel.watch"].report(error)  # the others must not wait for this process
        return 2
    Console(stderr=True).print(f"moejax {' '.join(args)}: no such command.\n\n{USAGE}", highlight=False, markup=False)
    return 2


def train(console: Console, path: str, overrides: list[str]) -> int:
    """Trains; 1 if the held-out loss is not below the Markov baseline's."""
    from moejax.config.load import load_config

    if "--help" in overrides:
        return show(console, path, ["--help"])
    config = load_config(path, overrides)
    from moejax.parallel import watch
    from moejax.stages.pretrain import ENDS, USER_ERRORS, run

    try:
        outcome = run(config, console)
    except USER_ERRORS as error:
        raise ConfigError(str(error)) from error
    except ENDS as error:
        Console(stderr=True).print(f"[bold red]the run ended:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        watch.report(error)
        return 1
    if not outcome.finished or outcome.baseline_nats is None or outcome.heldout_nats < outcome.baseline_nats:
        return 0
    console.print(
        f"[bold red]the model did not learn more than counting does:[/] {outcome.heldout_nats:.4f} against {outcome.baseline_nats:.4f} nats"
    )
    return 1


def show(console: Console, path: str, overrides: list[str]) -> int:
    """Prints the plan."""
    from moejax.config.load import help_text, load_config, to_json
    from moejax.config.run import resolve
    from moejax.train.report import plan_lines
    from moejax.train.saved import plan_saved, table_lines

    if "--help" in overrides:
        console.print(help_text(load_config(path)), highlight=False, markup=False)
        return 0
    memory, overrides = "--memory" in overrides, [arg for arg in overrides if arg != "--memory"]
    given, overrides = _take("--devices", overrides)
    if given is not None and not (given.isdigit() and int(given)):
        raise ConfigError(f"--devices={given!r} must be a positive number.")
    config = load_config(path, overrides)
    devices = int(given or config.mesh.simulate_devices)
    if not devices:
        raise ConfigError("show needs to know the number of devices: pass --devices N, or set mesh.simulate_devices.")
    plan = resolve(config, devices)
    choices = plan_saved(plan, gpu=not config.mesh.simulate_devices)
    console.print("\n".join(plan_lines(plan)), highlight=False, markup=False, soft_wrap=True)
    if memory:
        console.print("\n".join(table_lines(choices, config.memory)), highlight=False, markup=False, soft_wrap=True)
        return 0
    console.print(to_json(plan.config), highlight=False, markup=False, soft_wrap=True)
    return 0


def plan(console: Console, path: str, overrides: list[str]) -> int:
    """Compiles the train step for GPUs that are not there."""
    from moejax.config.load import load_config
    from moejax.plan.targets import parse
    from moejax.plan.train_step import plan_step

    given, overrides = _take("--target", overrides)
    target, count = parse(given or "")
    config = load_config(path, overrides)
    console.print(plan_step(config, target, count).report, highlight=False, markup=False, soft_wrap=True)
    return 0


def _take(name: str, args: list[str]) -> tuple[str | None, list[str]]:
    """The value of an option that is no field of the config, and the other arguments."""
    for at, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if option == name:
            given = value if equals else args[at + 1] if at + 1 < len(args) else ""
            return given, args[:at] + args[at + (1 if equals else 2) :]
    return None, args


def doctor(console: Console) -> int:
    """Prints what this machine can run; 1 if something that is always needed is missing."""
    from moejax.observe.doctor import examine

    rows = examine()
    for row in rows:
        mark = "[green]ok[/]     " if row.ok else "[red]missing[/]" if row.needed else "[yellow]without[/]"
        mend = f" -> {row.mend}" if row.mend and not row.ok else ""
        console.print(f"{mark} {escape(f'{row.name:16} {row.found}{mend}')}", highlight=False, soft_wrap=True)
    return 1 if any(row.needed and not row.ok for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
