"""Read, show and plot logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualtrain._lazy import lazy_exports

if TYPE_CHECKING:
    from dualtrain.logs.attention_plot import plot_attention as plot_attention
    from dualtrain.logs.monitor_plot import plot_monitor as plot_monitor
    from dualtrain.logs.plot import plot_logs as plot_logs
    from dualtrain.logs.reader import Log as Log
    from dualtrain.logs.reader import read_log as read_log
    from dualtrain.logs.reader import read_ranks as read_ranks

_EXPORTS = {
    "Log": "dualtrain.logs.reader:Log",
    "plot_attention": "dualtrain.logs.attention_plot:plot_attention",
    "plot_logs": "dualtrain.logs.plot:plot_logs",
    "plot_monitor": "dualtrain.logs.monitor_plot:plot_monitor",
    "read_log": "dualtrain.logs.reader:read_log",
    "read_ranks": "dualtrain.logs.reader:read_ranks",
}

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
