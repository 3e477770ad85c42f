"""Reports: one self-contained page a run, or several runs side by side, made from what run directories hold."""

from calfat_plugin.report.write import try_report, write_comparison, write_run_report

__all__ = ["try_report", "write_comparison", "write_run_report"]
