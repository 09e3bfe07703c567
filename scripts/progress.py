"""Runs the steps of a set-up one after another, showing which one runs, for how long, and what it last said."""

import collections
import os
import shutil
import subprocess
import sys
import threading
import time


class StepError(Exception):
    """A step failed; the message holds the end of its output."""


class Progress:
    """On a terminal one moving line a step, else a line at its start, its end, and every 30 s. All output goes to the file `log`."""

    def __init__(self, log):
        self.log = log
        self.began = time.monotonic()
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.steps = 0

    def elapsed(self):
        """Seconds since the first step could have begun."""
        return time.monotonic() - self.began

    def run(self, title, command):
        """Run `command` as the next step and return its last line; StepError where it fails."""
        self.steps += 1
        head = f"  [{self.steps}] {title}"
        began = time.monotonic()
        tail = collections.deque([""], maxlen=30)
        if not self.live:
            print(f"{head} ...", flush=True)
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
                errors="replace",
            )
            reader = threading.Thread(target=_copy, args=(process.stdout, log, tail), daemon=True)
            reader.start()
            try:
                self._watch(reader, head, began, tail)
                status = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        outcome = "done" if status == 0 else f"FAILED (exit status {status})"
        print(f"{self._fresh_line()}{head}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
        if status != 0:
            raise StepError("\n".join(tail))
        return tail[-1]

    def _watch(self, reader, head, began, tail):
        reported = began
        while reader.is_alive():
            reader.join(0.1)
            now = time.monotonic()
            line = f"{head}: {now - began:.0f} s  {tail[-1].strip()}"
            if self.live:
                print(self._fresh_line() + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            elif now - reported > 30:
                reported = now
                print(line[:120], flush=True)

    def _fresh_line(self):
        return "\r\033[K" if self.live else ""


def _copy(source, log, tail):
    for line in source:
        log.write(line)
        if line.strip():
            tail.append(line.rstrip())
