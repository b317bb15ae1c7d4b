"""Follow a chain to its end and print its result: what commands that follow share."""

from __future__ import annotations

from contextlib import aclosing

from pingpong_client.client import AsyncClient, finished
from pingpong_client.commands.context import Context
from pingpong_client.live import AWAY, ChainView, LiveView, PlainView, SilentView, watch
from pingpong_client.progress import ChainProgress
from pingpong_client.result_table import result_table, texts
from pingpong_client.table import clean


async def show_chain(context: Context, client: AsyncClient, progress: ChainProgress) -> int:
    """Show a followed chain while it runs, then its texts and figures.

    Raises:
        ChainFailed: it did not finish.
    """
    if progress.state == "queued" and progress.why:
        context.note(clean(f"{progress.id} is queued: {progress.why}", lines=False))
    view = _view(context, client, progress)
    async with aclosing(client.follow(progress.id)) as events:
        await watch(events, progress, view)
    result = await client.wait(progress.id)
    if context.args.json:
        context.write_json(result)
    else:
        shown = view.shown if isinstance(view, PlainView) else ()
        context.stdout.write(texts(result, without=shown))
        context.write(*result_table(result, context.width))
    finished(result)
    return 0


def tell_absence(context: Context, client: AsyncClient) -> None:
    """Tell on standard error when the daemon goes away, and when it is back."""

    def tell(away: bool) -> None:
        context.note(f"{AWAY}." if away else "the daemon is back.")

    client.on_away = tell


def _view(context: Context, client: AsyncClient, progress: ChainProgress) -> ChainView:
    if context.args.json:
        return SilentView()
    if context.on_terminal:
        client.on_away = None  # the view shows it
        return LiveView(progress, context.console(), away_s=lambda: client.away_s)
    return PlainView(progress, context.stdout)
