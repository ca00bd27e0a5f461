"""Render a board as Grafana's JSON with Grafana's own builders, which accept only valid dashboards."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.boards import DEPLOYS, Board, Panel

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24  # columns of Grafana's grid
SIZES = {"stat": (3, 4), "lines": (8, 8), "stack": (8, 8), "heatmap": (8, 8)}  # width, height


def render(board: Board) -> str:
    """Return the text of a board's file; equal boards give equal bytes."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .tags(["quire"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    if board.deploys:
        annotation = (
            dashboard.AnnotationQuery()
            .name("Deploys")
            .datasource(SOURCE)
            .enable(True)
            .icon_color("purple")
            .expr(DEPLOYS)
        )
        built = built.annotation(annotation)
    y = 0
    for heading, panels in board.rows.items():
        built = built.with_row(dashboard.Row(heading).grid_pos(GridPos(h=1, w=WIDTH, x=0, y=y)))
        y, x, tallest = y + 1, 0, 0
        for panel in panels:
            width, height = SIZES[panel.kind]
            if x + width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            built = built.with_panel(_panel(panel).grid_pos(GridPos(h=height, w=width, x=x, y=y)))
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    built: timeseries.Panel | stat.Panel | heatmap.Panel
    if panel.kind == "stat":
        built = stat.Panel().graph_mode(BigValueGraphMode.AREA)
    elif panel.kind == "heatmap":
        built = heatmap.Panel()
    else:
        built = timeseries.Panel().min(0).fill_opacity(30 if panel.kind == "stack" else 5)
        if panel.kind == "stack":
            built = built.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    built = built.title(panel.title).unit(panel.unit).datasource(SOURCE)
    if panel.text:
        built = built.description(panel.text)
    for at, (legend, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + at)).expr(query).legend_format(legend or panel.title)
        if panel.kind == "heatmap":
            target = target.format(PromQueryFormat.HEATMAP)
        built = built.with_target(target)
    return built
