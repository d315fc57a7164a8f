#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Removes or weakens each fence, release, acquire and proxy fence of the kernels in turn, and shows which a suite notices.

  remove_fences.py list     fails when a function of base/device that orders memory is not known here, or called nowhere
  remove_fences.py build BUILD OUT [--bfloat16] [--only TEXT] [--jobs N]     where nvcc is; BUILD is a Meson build folder; it
                   needs no GPU
  remove_fences.py emulate BUILD [--only TEXT] [--jobs N]     without a GPU: kernels run on the CPU, where lanes run one after
                   the other and bulk copies are made as late as PTX allows; memory order is strong, so no fence is noticed
  remove_fences.py run OUT [--gpus 4] [--seconds 4] [--only TEXT] [-- SUITE ARGS...]     where GPUs are; OUT may be copied there
                   SUITE and its arguments: soak --seconds T --kinds 90, which creates four groups, unless others are given

A variant is libepx as the suites use it (tests/gpu/libepx_hooked.so, tests/emulation/libepx_emulated.so) with one call of an
ordering function removed or weakened in the source text of runtime/stages/cuda and runtime/nodes. `run` starts the soak (or
SUITE, a program of OUT/bin) on 2 ranks, as many at a time as there are GPUs for, then on all GPUs, for so many seconds each,
and prints for each variant

  caught   a suite failed, and its first words
  hang     it did not end in time, and was killed
  -        no suite noticed: a comment at the call says why it is needed

The suite must first pass with the kernels unchanged.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = [pathlib.Path('runtime/stages/cuda'), pathlib.Path('runtime/nodes')]
VARIANTS = 'variants.tar.xz'
SUITES = ['soak', 'random_layers', 'faults', 'graphs']
LAUNCHER = 'tests/support/epx_test_launch'
# Suites with the kernels on the CPU; the one that notices most, and soonest, comes first.
EMULATED = [['soak', '--iterations', '30', '--busy-tokens', '0'], ['random_layers', '--groups', '3', '--layers', '10']]
GRACE_S = 25  # for creating groups, and for the launcher to end its ranks

# What each call becomes, and the word for it in the output.
WEAKER = {
    'fence_acq_rel_sys()': ('static_cast<void>(0)', 'removed'),
    'fence_acq_rel_block()': ('static_cast<void>(0)', 'removed'),
    'fence_shared_before_bulk_copies()': ('static_cast<void>(0)', 'removed'),
    'fence_global_before_bulk_copies()': ('static_cast<void>(0)', 'removed'),
    '__syncwarp()': ('static_cast<void>(0)', 'removed'),
    'wait_for_store_reads<0>()': ('static_cast<void>(0)', 'removed'),
    'wait_for_stores()': ('wait_for_store_reads<0>()', 'waits for reads only'),
    'wait_for_async_copies<kReaderStages - 1>()': ('static_cast<void>(0)', 'removed'),
    'wait_for_async_copies<kStages - 1>()': ('static_cast<void>(0)', 'removed'),
    'store_release_sys(': ('store_relaxed_sys(', 'relaxed'),
    'load_acquire_sys(': ('load_relaxed_sys(', 'relaxed'),
    'load_packet_acquire_sys(': ('load_packet_relaxed_sys(', 'relaxed'),
}
# Kernels are instantiated for each dtype; the soak needs one of them.
DTYPES = re.compile(r'\b((?:batch_)?gather_kernel|launch_as|CombineBwd|launch_combine_bwd_as)<(?:float|__half)\b')
CALL = re.compile('|'.join(r'(?<![\w.])' + re.escape(verb) for verb in WEAKER))


@dataclasses.dataclass
class Site:
    name: str  # name of the variant and of its folder
    file: str  # path in the repository
    line: int
    begin: int  # column of the call
    verb: str

    @property
    def done(self):
        return WEAKER[self.verb][1]

    def source(self, root):
        """The file's text with the call removed or weakened."""
        lines = (root / self.file).read_text().splitlines(keepends=True)
        line = lines[self.line - 1]
        weaker = WEAKER[self.verb][0]
        lines[self.line - 1] = line[:self.begin] + weaker + line[self.begin + len(self.verb):]
        return ''.join(lines)


def find_sites(root, only=''):
    sites = []
    for path in sorted(path for folder in KERNELS for path in (root / folder).rglob('*.cu*')):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split('//')[0]
            for call in CALL.finditer(code):
                name = f'{path.name}-{number}' + (f'-{call.start()}' if len(CALL.findall(code)) > 1 else '')
                sites.append(Site(name, str(path.relative_to(root)), number, call.start(), call.group()))
    return [site for site in sites if only in f'{site.name} {site.verb}']


def unknown_verbs(root):
    """The functions of base/device that order memory and have no entry in WEAKER."""
    known = {verb.split('(')[0].split('<')[0] for verb in WEAKER}
    verbs = set()
    for path in (root / 'base/device').glob('*.cuh'):
        verbs |= set(re.findall(
            r'__device__ inline [\w ]+?(\w*(?:fence|acquire|release|wait_for_store|wait_for_async)\w*)\(', path.read_text()))
    return sorted(verbs - known)


def list_sites():
    sites = find_sites(ROOT)
    for site in sites:
        print(f'{site.file}:{site.line} {site.verb} {site.done}')
    problems = [f'{verb} has no weaker form' for verb in unknown_verbs(ROOT)]
    problems += [f'{verb} is called nowhere' for verb in sorted(set(WEAKER) - {site.verb for site in sites})]
    for problem in problems:
        print(f'remove_fences.py: {problem}', file=sys.stderr)
    return 1 if problems else 0


# ---- Building --------------------------------------------------------------------------------------------------------

class LibraryBuild:
    """Ninja's commands for a library and for its kernels, which are the source files that end in `suffix`."""

    def __init__(self, build, library, suffix, programs):
        self.build = build
        self.library = library
        self.programs = programs
        self.ninja('-C', build, library, *programs)
        self.link = []
        compiled = {}
        for line in self.ninja('-C', build, '-t', 'commands', library).splitlines():
            words = shlex.split(line)
            if '-o' not in words:
                continue
            output = words[words.index('-o') + 1]
            if output == library:
                self.link = words
            elif '-c' in words and words[words.index('-c') + 1].endswith(suffix):
                compiled[output] = words
        # The compiler command of each object.
        self.kernels = {name: words for name, words in compiled.items() if name in self.link}
        self.inputs = {}  # the files that each object was first compiled from

    @staticmethod
    def ninja(*arguments):
        return subprocess.run(['ninja', *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout

    def objects_with(self, file):
        """The objects that are compiled from this file, or include it; all must have been compiled once."""
        return [name for name in self.kernels if file in self.inputs[name]]

    def compile(self, name, folder, sources):
        """Compiles for Hopper alone, into `folder`, whose files override `sources`, which override the repository."""
        words = [word for word in self.kernels[name] if word != '-lineinfo' and pathlib.Path(word).name != 'ccache']
        words = ['-gencode=arch=compute_90,code=sm_90' if word.startswith('-gencode=') else word for word in words]
        source = os.path.relpath(self.build / words[words.index('-c') + 1], ROOT)
        output = folder / pathlib.Path(name).name
        words[words.index('-c') + 1] = str(next(root / source for root in [folder, sources, ROOT] if (root / source).exists()))
        words[words.index('-o') + 1] = str(output)
        words[words.index('-MF') + 1] = str(output) + '.d'
        words[1:1] = ['-I', str(folder), '-I', str(sources)]
        compiler = subprocess.run(words, cwd=self.build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if compiler.returncode != 0:
            sys.exit(f'{shlex.join(words)}: {compiler.stdout}')
        depfile = pathlib.Path(str(output) + '.d').read_text().replace('\\\n', ' ')
        self.inputs.setdefault(name, {os.path.relpath(self.build / word, sources) for word in depfile.split()[1:]})
        return output

    def link_with(self, objects, library):
        words = [str(objects.get(word, word)) for word in self.link]
        words[words.index('-o') + 1] = str(library)
        subprocess.run(words, check=True, cwd=self.build)
        subprocess.run(['strip', '--strip-unneeded', str(library)], check=True)


def build_variant(hooked, out, sources, site, plain):
    folder = out / 'variants' / (site.name if site else 'unchanged')
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / pathlib.Path(hooked.library).name
    objects = dict(plain)
    if site:
        work = out / 'work' / site.name
        (work / site.file).parent.mkdir(parents=True, exist_ok=True)
        (work / site.file).write_text(site.source(sources))
        for name in hooked.objects_with(site.file):
            objects[name] = hooked.compile(name, work, sources)
    hooked.link_with(objects, library)
    if site:
        shutil.rmtree(work)
    print(f'{folder.name}: {library.stat().st_size >> 10} KiB', flush=True)
    if library.name == 'libepx_emulated.so':
        return
    (folder / 'libepx.so.0').unlink(missing_ok=True)
    (folder / 'libepx.so.0').symlink_to(library.name)  # for suites that use the public library


def copy_programs(built, out):
    """Copies the suites, and the libraries that a machine without this repository's packages lacks."""
    (out / 'bin').mkdir(exist_ok=True)
    (out / 'lib').mkdir(exist_ok=True)
    for program in built.programs:
        copy = out / 'bin' / re.sub('_(gpu|emulated)$', '', pathlib.Path(program).name)
        shutil.copy(built.build / program, copy)
        subprocess.run(['strip', str(copy)], check=True)
    needed = subprocess.run(['ldd', str(built.build / built.library)], check=True, stdout=subprocess.PIPE, text=True).stdout
    for name, path in re.findall(r'(lib(?:fmt|spdlog)\S*) => (\S+)', needed):
        shutil.copy(path, out / 'lib' / name)


def build_variants(built, out, options, is_bfloat16=False):
    """Builds all variants into OUT/variants; returns the sites."""
    sources = out / 'work/sources'  # a copy, since the sources may be edited meanwhile
    shutil.rmtree(out / 'work', ignore_errors=True)
    for folder in KERNELS:
        shutil.copytree(ROOT / folder, sources / folder)
    if is_bfloat16:
        for path in sources.rglob('*.cu'):
            path.write_text(DTYPES.sub(r'\1<__nv_bfloat16', path.read_text()))
    sites = find_sites(sources, options.only)
    (out / 'work/plain').mkdir()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {name: pool.submit(built.compile, name, out / 'work/plain', sources) for name in built.kernels}
        plain = {name: task.result() for name, task in waiting.items()}
        waiting = [pool.submit(build_variant, built, out, sources, site, plain) for site in [None, *sites]]
        for task in waiting:
            task.result()
    shutil.rmtree(out / 'work')
    copy_programs(built, out)
    return sites


def build(options):
    out = options.out.resolve()
    hooked = LibraryBuild(options.build.resolve(), 'tests/gpu/libepx_hooked.so', '.cu',
                          [f'tests/gpu/{suite}_gpu' for suite in SUITES] + [LAUNCHER])
    sites = build_variants(hooked, out, options, options.bfloat16)
    with tarfile.open(out / VARIANTS, 'w:xz') as archive:  # xz, since the variants differ little
        archive.add(out / 'variants', 'variants')
    shutil.rmtree(out / 'variants')
    (out / 'sites.json').write_text(json.dumps([dataclasses.asdict(site) for site in sites], indent=1))
    shutil.copy(__file__, out)


# ---- Running ---------------------------------------------------------------------------------------------------------

def run_suite(out, variant, gpus, command, seconds):
    """The outcome in a few words; None when the suite passed."""
    limit = seconds + GRACE_S
    paths = [out / 'variants' / variant, out / 'lib', os.environ.get('LD_LIBRARY_PATH', '')]
    environment = dict(os.environ, LD_LIBRARY_PATH=':'.join(map(str, paths)), CUDA_VISIBLE_DEVICES=','.join(map(str, gpus)))
    words = [str(out / 'bin/epx_test_launch'), '-n', str(len(gpus)), '--timeout', str(limit), '--',
             str(out / 'bin' / command[0]), *command[1:]]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors='replace', start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit + 10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return 'hang (the launcher too)'
    if process.returncode == 0 or output.count('checks passed') == len(gpus):  # a concurrent run may leave something behind
        return None
    if process.returncode == 77:
        return 'SKIPPED: ' + output.strip()[-150:]
    own_words = [line for line in output.splitlines()
                 if line.startswith('[') and 'checks passed' not in line and '] progress: ' not in line]
    if not own_words and 'stopped by the launcher' in output:
        return 'hang'
    return 'caught: ' + (own_words[0] if own_words else output.strip()[-150:])[:150]


def emulate(options):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        built = LibraryBuild(options.build.resolve(), 'tests/emulation/libepx_emulated.so', '.cc',
                             [f'tests/emulation/{command[0]}_emulated' for command in EMULATED] + [LAUNCHER])
        built.kernels = {name: words for name, words in built.kernels.items()
                         if pathlib.Path(name).name.removesuffix('.cc.o') in ['gather', 'prepare', 'scatter']}
        sites = build_variants(built, out, options)
        shutil.copy(built.build / 'runtime/libepx.so.0', out / 'lib')  # the launcher needs it
        os.environ.update(MALLOC_PERTURB_='0', EPX_TEST_ALTERNATES_PATHS='1')

        def first_found(name):
            found = (run_suite(out, name, range(3), command, seconds=60) for command in EMULATED)
            return next((words for words in found if words), None)

        if found := first_found('unchanged'):
            print(f'unchanged: {found}')
            return 1
        results = {}
        for site in sites:
            results[site.name] = first_found(site.name)
            print(f'{site.name} | {site.file}:{site.line} {site.verb} {site.done} | {results[site.name] or "-"}', flush=True)
        print(f'{sum(map(bool, results.values()))} of {len(sites)} noticed by the kernels on the CPU')
    return 0


def run(options):
    out = options.out.resolve()
    if not (out / 'variants').exists():
        with tarfile.open(out / VARIANTS) as archive:
            archive.extractall(out)
    sites = [Site(**site) for site in json.loads((out / 'sites.json').read_text())]
    sites = [site for site in sites if options.only in f'{site.name} {site.verb}']
    command = options.command or ['soak', '--seconds', str(options.seconds), '--kinds', '90']
    pairs = [range(first, first + 2) for first in range(0, options.gpus - 1, 2)]
    groups = [pairs] if options.gpus < 4 else [pairs, [range(options.gpus)]]
    for gpus in (group[0] for group in groups):
        if found := run_suite(out, 'unchanged', gpus, command, options.seconds):
            print(f'unchanged, on {len(gpus)} GPUs: {found}')
            return 1
    print(f'unchanged: {shlex.join(command)} passes', flush=True)
    noticed = 0
    with concurrent.futures.ThreadPoolExecutor(len(pairs)) as pool:
        def run_on_any(group, name):  # `group` has as many sets of GPUs as there are workers
            gpus = group.pop()
            try:
                return run_suite(out, name, gpus, command, options.seconds)
            finally:
                group.append(gpus)

        for first in range(0, len(sites), len(pairs)):
            some = sites[first:first + len(pairs)]
            results = [list(pool.map(lambda site: run_on_any(groups[0], site.name), some))]
            results += [[run_on_any(group, site.name) for site in some] for group in groups[1:]]
            for site, of_site in zip(some, zip(*results)):
                noticed += any(of_site)
                words = ' | '.join(f'P={len(group[0])}: {found or "-"}' for group, found in zip(groups, of_site))
                print(f'{site.name} | {site.file}:{site.line} {site.verb} {site.done} | {words}', flush=True)
    print(f'{noticed} of {len(sites)} noticed by {shlex.join(command)}')
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest='mode', required=True)
    modes.add_parser('list')
    building = modes.add_parser('build')
    building.add_argument('build', type=pathlib.Path)
    building.add_argument('out', type=pathlib.Path)
    building.add_argument('--jobs', type=int, default=os.cpu_count())
    building.add_argument('--bfloat16', action='store_true',
                          help='build kernels of this dtype alone: enough for the soak, and quicker')
    emulating = modes.add_parser('emulate')
    emulating.add_argument('build', type=pathlib.Path)
    emulating.add_argument('--jobs', type=int, default=os.cpu_count())
    running = modes.add_parser('run')
    running.add_argument('out', type=pathlib.Path)
    running.add_argument('--gpus', type=int, default=4)
    running.add_argument('--seconds', type=int, default=4)
    for mode in building, emulating, running:
        mode.add_argument('--only', default='', metavar='TEXT', help='variants with this in their name or verb')
    # argparse takes no positional arguments after options.
    end = sys.argv.index('--') if '--' in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    options.command = sys.argv[end + 1:]
    if options.mode == 'list':
        return list_sites()
    if options.mode == 'build':
        return build(options)
    if options.mode == 'emulate':
        return emulate(options)
    return run(options)


if __name__ == '__main__':
    sys.exit(main())
