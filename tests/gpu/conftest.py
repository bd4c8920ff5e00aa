"""The suite on a machine with an NVIDIA GPU: markers; `make gpu-check` sets the paths.

A failure is printed when it is found, too: a run that is ended may not come to its summary.
"""

import signal

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: seconds; if it fails nothing else will do")
    config.addinivalue_line("markers", "threads: ranks are threads of the test's process")
    config.addinivalue_line("markers", "processes: goes through peers' memory (CUDA IPC), and needs no NCCL")
    config.addinivalue_line("markers", "nccl: needs an NCCL that lets ranks share a GPU")
    config.pluginmanager.register(Failures(config), "failures")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on Ctrl-C, pytest prints the failures that it has


def pytest_runtestloop(session):
    if not session.config.option.collectonly and not torch.cuda.is_available():
        raise pytest.UsageError("torch sees no GPU")


class Failures:
    def __init__(self, config):
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(report.longreprtext)
