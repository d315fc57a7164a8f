# SPDX-License-Identifier: Apache-2.0
"""What epx raises. Each exception has the sentence of the C library, and the fields of the group's report where there is
one."""

import ctypes

from . import _interrupt, _structs
from ._structs import Operation, Phase, Status, known


class Error(Exception):
    """A call of epx failed.

    status: Status. For a failure that has ended the group (`GroupError`) the other fields are those of the group's report:
    operation (Operation, the call that failed), phase (where it waited), culprit (the rank that caused it, None where there is
    none), missing (the ranks that were waited for in vain, of a timeout), sequence (number of the failed call, from 1).
    """

    def __init__(self, message, status, operation=Operation.NONE, phase=Phase.NONE, culprit=None, missing=(), sequence=0):
        super().__init__(message)
        self.status = status
        self.operation = operation
        self.phase = phase
        self.culprit = culprit
        self.missing = tuple(missing)
        self.sequence = sequence


class InvalidArgumentError(Error, ValueError):
    """The call was refused: it has touched nothing and is not part of the group's sequence of calls."""


class UnsupportedError(Error, NotImplementedError):
    """This build, transport or machine cannot do it; nothing happened."""


class GroupError(Error):
    """The group has ended: each later call raises this too. Destroy it and create another."""


class EventError(Error):
    """Group.check() found recoverable errors since the last check; the group lives on.

    events: {EventKind: count}, in routes (calls for HANDLE_MISMATCH, slices for BAD_SLICE). operation and sequence tell the call
    of the first one.
    """

    def __init__(self, message, events, operation, sequence):
        super().__init__(message, Status.SUCCESS, operation=operation, sequence=sequence)
        self.events = events


def last_sentence():
    return _structs.epx_last_error().decode(errors="replace")


def _kind_of(status):
    return {Status.INVALID_ARGUMENT: InvalidArgumentError, Status.UNSUPPORTED: UnsupportedError}.get(status, Error)


def raise_if_failed(status, sentence=last_sentence):
    """Raises the exception of a call that no group is behind."""
    if status != Status.SUCCESS:
        _interrupt.reraise()
        raise _kind_of(status)(sentence(), known(Status, status))


def read_report_or_none(group):
    """None where another thread has destroyed the group."""
    report = _structs.GroupReport(struct_size=ctypes.sizeof(_structs.GroupReport))
    status = _structs.epx_group_status(group, report)
    if status == Status.ABORTED:
        return None
    raise_if_failed(status)
    return report


def read_report(group):
    report = read_report_or_none(group)
    if report is None:
        raise GroupError(last_sentence(), Status.ABORTED)
    return report


def group_error(report):
    """The exception of a report whose status is not SUCCESS."""
    return GroupError(
        report.message.decode(errors="replace"),
        known(Status, report.status),
        operation=known(Operation, report.operation),
        phase=known(Phase, report.phase),
        culprit=report.culprit if report.culprit >= 0 else None,
        missing=report.missing[: min(report.num_missing, _structs.MAX_REPORTED_RANKS)],
        sequence=report.sequence,
    )


def raise_call_failed(group, status):
    """Raises the exception of a failed call of a group. The report is read only when the group has ended, since reading it
    clears the recoverable events, which are check()'s to tell."""
    sentence = last_sentence()
    _interrupt.reraise()
    if status not in (Status.INVALID_ARGUMENT, Status.UNSUPPORTED):
        report = read_report_or_none(group)
        if report is None:  # another thread has destroyed the group meanwhile
            raise GroupError(sentence, known(Status, status))
        if report.status != Status.SUCCESS:
            raise group_error(report)
    raise _kind_of(status)(sentence, known(Status, status))
