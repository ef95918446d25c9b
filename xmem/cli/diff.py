"""`xmem diff`: compares two runs, or a run with its prediction, and can be a gate for CI."""

from __future__ import annotations

from typing import Any

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@store_option
@click.option("--predicted", is_flag=True, help="Compare A with the newest replay of it instead of with B.")
@click.option("--by", multiple=True, metavar="KEY", help="category, module, operator, stack or step.  [default: all]")
@click.option("--rank", type=int, help="Rank to compare.  [default: the one with the highest peak]")
@click.option("--device", metavar="NAME", help="Device to compare: cuda:0, cpu.  [default: highest peak]")
@click.option("--top", type=click.IntRange(min=1), default=10, help="Lines wanted for each key.")
@click.option("--fail-above", metavar="LIMIT", help="Exit 1 where a peak of B is higher by more than this: 2%, 100MiB.")
@json_option
def command(a: str, b: str | None, predicted: bool, fail_above: str | None, as_json: bool, **options: Any) -> int:
    """Say which memory came and which went from run A to run B.

    \b
    xmem diff before after
    xmem diff before after --fail-above 2%     a gate for CI
    xmem diff before --predicted               recorded against replayed
    """
    from xmem.errors import EXIT_DOES_NOT_FIT, EXIT_OK
    from xmem.query.diff import KEYS, DiffOptions, diff, diff_predicted, parse_limit
    from xmem.render import json_text
    from xmem.render_diff import diff_json, diff_text

    if fail_above is not None:
        parse_limit(fail_above)
    if predicted == (b is not None):
        raise click.UsageError("Give two runs, or one run with --predicted.")
    chosen = DiffOptions(options["rank"], options["device"], options["by"] or tuple(KEYS), options["top"])
    found = (
        diff(a, b, store=options["store"], options=chosen)
        if b is not None
        else diff_predicted(a, store=options["store"], options=chosen)
    )
    print_text(json_text(diff_json(found)) if as_json else diff_text(found, width=terminal_width()))
    if fail_above is not None and found.exceeds(fail_above):
        word = "differs from" if found.predicted else "is above"
        click.echo(f"B {word} A by more than {fail_above}.", err=True)
        return EXIT_DOES_NOT_FIT
    return EXIT_OK
