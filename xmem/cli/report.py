"""`xmem report`: named reports, the HTML page and single charts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.cli.options import json_option, print_text, store_option, terminal_width

if TYPE_CHECKING:
    from xmem.query.reports import Report


@click.command()
@click.argument("name", required=False, default="summary")
@click.argument("run", required=False)
@store_option
@click.option("--rank", type=int, help="Rank to report on.  [default: the one with the highest peak]")
@click.option("--device", metavar="NAME", help="Device to report on: cuda:0, cpu.  [default: highest peak]")
@click.option("--top", type=click.IntRange(min=1), default=15, help="Rows wanted.")
@click.option("--reports", "folder", metavar="FOLDER", envvar="XMEM_REPORTS", help="Folder with SQL files of your own.")
@click.option("--list", "only_list", is_flag=True, help="List the reports.")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option(
    "-o", "--output", metavar="FILE", help="Write to FILE: .parquet, .csv, .json; .html for html; .png, .svg."
)
@click.option("--force", is_flag=True, help="Replace the output file where there is one.")
def command(name: str, run: str | None, output: str | None, only_list: bool, **options: Any) -> None:
    """Answer a usual question about a run (the newest, where no RUN is named).

    \b
    xmem report                        the answer in five seconds
    xmem report peak                   what the highest memory is made of
    xmem report html -o page.html      everything on one page, offline
    xmem report memory -o memory.png   one chart of that page (svg too)
    xmem report --list                 all of them

    A report is one SQL file; put your own into a folder and name it with --reports.
    """
    from xmem.query.reports import ReportOptions, report

    if only_list:
        print_text(_listing(options["folder"]))
        return
    chosen = ReportOptions(options["rank"], options["device"], options["top"], options["folder"])
    if name == "html" or (output or "").lower().endswith((".png", ".svg")):
        _write_picture(name, run, output, chosen, options)
        return
    _print_report(report(name, run, store=options["store"], options=chosen), output, options)


def _listing(folder: str | None) -> str:
    from xmem.query.charts import CHARTS
    from xmem.query.reports import reports
    from xmem.render import fact_lines

    lines = ["Reports:", *fact_lines((one.name, one.help) for one in reports(folder))]
    lines += ["Pictures (with -o):", "  html  One page with everything, self-contained: -o page.html"]
    return "\n".join([*lines, *fact_lines((name, text + " -o x.png or x.svg") for name, text in CHARTS.items())])


def _write_picture(name: str, run: str | None, output: str | None, chosen: Any, options: dict[str, Any]) -> None:
    from xmem.cli.output import check_target
    from xmem.errors import UsageError
    from xmem.render import make_inert

    if output is None:
        raise UsageError("The page needs a file to be written to.", "Name it: xmem report html -o page.html")
    suffixes = (".html", ".htm") if name == "html" else (".png", ".svg")
    check_target(Path(output), force=options["force"], suffixes=suffixes)
    if name == "html":
        from xmem.query.html import write_page

        write_page(Path(output), run, store=options["store"], options=chosen)
    else:
        from xmem.query.charts import write_chart

        write_chart(name, Path(output), run, store=options["store"], options=chosen)
    click.echo(f"written to {make_inert(output)}", err=True)


def _print_report(found: Report, output: str | None, options: dict[str, Any]) -> None:
    from xmem.cli.output import check_target, write_rows
    from xmem.render import csv_rows, json_rows, make_inert
    from xmem.render_report import report_text

    if output is not None:
        check_target(Path(output), force=options["force"])
        write_rows(found.table, Path(output))
        click.echo(f"{found.table.num_rows:,} rows written to {make_inert(output)}", err=True)
    elif options["as_json"]:
        click.echo("".join(json_rows(found.columns, found.rows())), nl=False)
    elif options["as_csv"]:
        click.echo("".join(csv_rows(found.columns, found.rows(), inert=sys.stdout.isatty())), nl=False)
    else:
        print_text(report_text(found, width=terminal_width()))
