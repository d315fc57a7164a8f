# SPDX-License-Identifier: Apache-2.0
"""Starts programs, each rank a process of its own, and lets several of them take turns on the same GPUs."""
import os
import signal
import subprocess
import time

POLL_S = 0.02


class Failed(Exception):
    """A program that could not run, or did not finish; the sentence says why."""


class Session:
    """The processes of one program, with a log for each rank."""

    def __init__(self, name, commands, environments, directory, limit_s):
        self.name, self.left_s, self.phases_s = name, limit_s, []
        self.logs = [directory / f"{name}.{rank}.log" for rank in range(len(commands))]
        self.processes = []
        try:
            for command, environment, log in zip(commands, environments, self.logs):
                with open(log, "w", encoding="utf-8") as output:
                    self.processes.append(subprocess.Popen(
                        list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.PIPE,
                        bufsize=0, env={**os.environ, **environment}, start_new_session=True))
        except BaseException:
            self.kill()
            raise

    def run_phase(self, phase):
        """Has every process begin the phase, and returns when all of them have ended it; phases_s has how long each took."""
        begin = time.monotonic()
        for process in self.processes:
            try:
                process.stdin.write(b"\n")
            except BrokenPipeError:
                pass  # it has ended; its log says why
        self.wait(lambda: all(f"phase {phase} done" in self.text_of(log).splitlines() for log in self.logs))
        self.phases_s.append(round(time.monotonic() - begin, 2))

    def finish(self):
        """Waits until all processes have ended."""
        self.wait(lambda: all(process.poll() == 0 for process in self.processes))

    def wait(self, is_done):
        begin = time.monotonic()
        while not is_done():
            ended = [process.poll() for process in self.processes]
            if any(ended):
                time.sleep(2)  # the others may have a better sentence
                raise Failed(self.sentence())
            if None not in ended and not is_done():
                raise Failed(f"{self.name} ended too early")
            if time.monotonic() - begin > self.left_s:
                raise Failed(f"{self.name} did not finish within its time")
            time.sleep(POLL_S)
        self.left_s -= time.monotonic() - begin

    def sentence(self):
        for process, log in zip(self.processes, self.logs):
            if process.poll() not in (0, None):
                lines = self.text_of(log).strip().splitlines() or ["it printed nothing"]
                return f"{self.name} ended with status {process.returncode}: {lines[-1]}"
        return f"{self.name} failed"

    def ran_out_of_memory(self):
        return any(words in self.text_of(log) for log in self.logs
                   for words in ("out of memory", "RESOURCE_EXHAUSTED", "OutOfMemory"))

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: only this process and its children
            process.wait()
            process.stdin.close()

    @staticmethod
    def text_of(log):
        return log.read_text(encoding="utf-8", errors="replace")


def run_ranks(name, commands, environments, directory, limit_s):
    """Runs one process for each command to its end; kills them all when one fails or the time is up."""
    session = Session(name, commands, environments, directory, limit_s)
    try:
        session.finish()
    finally:
        session.kill()


def run_in_turns(sessions, phases):
    """Has {program: Session} run the phases in turn, all of them each phase, so that what a program measures is spread over
    the whole time. Returns {program: Failed} of those that did not end well."""
    failed = {}

    def run(program, action):
        try:
            action()
        except Failed as failure:
            failed[program] = failure
            sessions[program].kill()

    try:
        for phase in range(phases):
            for program, session in sessions.items():
                if program not in failed:
                    run(program, lambda session=session: session.run_phase(phase))
        for program, session in sessions.items():
            if program not in failed:
                run(program, session.finish)
    finally:
        for session in sessions.values():
            session.kill()
    return failed
