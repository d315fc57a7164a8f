# SPDX-License-Identifier: Apache-2.0
"""Reads the text of an optimised HLO module and tells in which order epx's calls must run.

Only what XLA's runtimes keep counts as order: operands, and control dependencies. An element of a tuple depends on that element
alone, and so does what passes through an optimization barrier, since barriers are gone when the program runs.
"""

import dataclasses
import re

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = .*?([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="epx_(?!hold)(\w+)"')
_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass
class Instruction:
    name: str
    opcode: str
    operands: list
    control: list
    called: list
    target: str | None
    index: int


def _split_operands(text):
    """The names of the operands in "a, %b), attributes", and the attributes."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text[:end] + ","):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [part.split()[-1].lstrip("%") for part in parts if part], text[end:]


class Module:
    def __init__(self, text):
        self.computations = {}
        self.entry = None
        current = None
        for line in text.splitlines():
            computation = _COMPUTATION.match(line)
            instruction = _INSTRUCTION.match(line)
            if computation and not line.startswith(" ") and not line.startswith("HloModule"):
                current = self.computations[computation.group(2)] = {}
                if computation.group(1):
                    self.entry = computation.group(2)
            elif instruction and current is not None:
                _, name, opcode, rest = instruction.groups()
                operands, attributes = _split_operands(rest)
                names = lambda pattern: [
                    each.strip().lstrip("%")
                    for match in pattern.findall(attributes)
                    for each in match.split(",")
                    if each.strip()
                ]
                target, index = _TARGET.search(attributes), _INDEX.search(attributes)
                current[name] = Instruction(
                    name,
                    opcode,
                    operands if opcode not in ("parameter", "constant") else [],
                    names(_CONTROL),
                    names(_CALLED) + names(_BRANCHES),
                    target.group(1) if target else None,
                    int(index.group(1)) if index else -1,
                )

    def calls(self, computation=None):
        """epx's calls in the computation and all that it calls, in the order of the calls; an element of a loop's body counts
        once. Raises ValueError when two of them may run in any order."""
        computation = computation or self.entry
        instructions = self.computations[computation]
        inner = {}
        for instruction in instructions.values():
            found = [instruction.target] if instruction.target else []
            for called in instruction.called:
                found += self.calls(called)
            if found:
                inner[instruction.name] = found
        behind = {name: self._behind(instructions, name) for name in inner}
        order = sorted(inner, key=lambda name: len(behind[name] & inner.keys()))
        for first, second in zip(order, order[1:]):
            if first not in behind[second]:
                raise ValueError(f"{computation}: nothing orders {first} ({inner[first]}) and {second} ({inner[second]})")
        return [call for name in order for call in inner[name]]

    @staticmethod
    def _behind(instructions, name):
        """What must have run before the instruction."""
        seen, found = set(), set()
        todo = [(each, None) for each in instructions[name].operands + instructions[name].control]
        while todo:
            each, element = todo.pop()
            if (each, element) in seen or each not in instructions:
                continue
            seen.add((each, element))
            instruction = instructions[each]
            if instruction.opcode == "get-tuple-element":
                todo += [(operand, instruction.index) for operand in instruction.operands]
            elif instruction.opcode == "tuple" and element is not None:
                todo.append((instruction.operands[element], None))
            elif instruction.opcode == "opt-barrier":
                if len(instruction.operands) == 1:
                    todo.append((instruction.operands[0], element))
            else:
                found.add(each)
                todo += [(operand, None) for operand in instruction.operands + instruction.control]
        return found
