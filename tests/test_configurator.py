"""Settings from files and flags: precedence, types, and every fault told in one line that says where it stands."""

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings, strategies as st

from nanope.configurator import configure, run
from nanope.usage import help_text

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Shape:
    n_layer: int = 12  # blocks
    n_head: int = 12  # heads in each block
    wpe: Literal['learned', 'rope', 'none'] = 'learned'  # position scheme; exactly one is active,
                                                         # and only learned owns a parameter
    # not about wpe
    dropout: float = 0.0  # share of activations set to zero

    def problems(self):
        found = []
        if self.n_layer % self.n_head:
            found.append(f'n_layer={self.n_layer} must be a multiple of n_head={self.n_head}.')
        if not 0 <= self.dropout < 1:
            found.append(f'dropout is {self.dropout}: it must be in [0, 1).')
        return found


@dataclass
class Settings(Shape):
    n_head: int = 1  # heads, stated anew
    start: str = '\n'  # text; '#' is no comment
    compile: bool | Literal['auto'] = 'auto'  # use torch.compile
    bias: bool = True  # in every Linear
    seed: int | None = None  # none: by the clock
    stop: str | None = None  # end of text
    every: Literal[1, 10] = 1  # steps

    def __post_init__(self):
        if self.start == 'refused':
            raise ValueError('start must not be refused.\nseed is in this too.')


def read(*argv):
    return configure(Settings, list(argv))[0]


def problems(*argv):
    with pytest.raises(ValueError) as caught:
        read(*argv)
    return str(caught.value).split('\n')


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config file and returns its name, relative to the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode('utf-8'))
        return name
    return write


# ---- what is accepted

def test_defaults_then_files_left_to_right_then_flags(write):
    a = write('a.py', 'n_layer = 2\ndropout = 0\nstart = "a"')
    b = write('b.py', 'n_layer = 3\nseed = 4')
    config, rest = configure(Settings, ['out/x', '--n_layer=4', a, 'y', b])
    assert config == Settings(n_layer=4, dropout=0.0, start='a', seed=4) and rest == ['out/x', 'y']
    assert type(config.dropout) is float


@pytest.mark.parametrize('flag, value', [
    ('--dropout=0', 0.0), ('--dropout=1e-3', 1e-3), ('--n_layer=1_000', 1000), ('--seed=-1', -1), ('--every=10', 10),
    ('--start=5', '5'), ('--start=true', 'true'), ('--start=None', 'None'), ('--start=', ''), ('--start=a=b=', 'a=b='),
    ('--start=--x', '--x'), ('--start=naïve ☃', 'naïve ☃'), ("--start='q'", "'q'"), ('--stop=5', '5'), ('--stop=', ''),
    ('--bias=false', False), ('--bias=TRUE', True), ('--compile=False', False), ('--compile=auto', 'auto'),
    ('--seed=none', None), ('--seed=NONE', None), ('--stop=None', None), ('--wpe=none', 'none')])
def test_words_on_the_command_line(flag, value):
    got = getattr(read(flag), flag[2:].split('=')[0])
    assert got == value and type(got) is type(value)


def test_a_config_may_compute_import_and_extend(write):
    write('extended/base.py', '\ufeffimport math\nfrom pathlib import Path\nfrom math import sqrt\n_n = 3\n_n = 4\n'
          'def twice(x):\n    n_layer = x * 2\n    return n_layer\n\n\nn_layer = twice(_n)\ndropout = sqrt(0.25) / 2\n'
          'if n_layer > 3:\n    start = "big"\nelse:\n    start = "small"\n')
    assert read('extended/base.py') == Settings(n_layer=8, dropout=0.25, start='big')
    more = write('extended/more.py', 'from extended.base import *\ndropout = 0.5')
    assert read(more) == Settings(n_layer=8, dropout=0.5, start='big')


# ---- what is refused, and how it is told

@pytest.mark.parametrize('flag, reason', [
    ('--n_layr=3', 'unknown setting n_layr; did you mean n_layer?'),
    ('--N-Layer=3', 'unknown setting N-Layer; did you mean n_layer?'),
    ('--zzz=3', 'unknown setting zzz; --help lists all'),
    ('--zzz', 'unknown setting zzz; --help lists all'),
    ('--n_layer=ten', "n_layer must be int, not 'ten'"),
    ('--n_layer=1.0', "n_layer must be int, not '1.0'"),
    ('--n_layer=true', "n_layer must be int, not 'true'"),
    ('--n_layer=', "n_layer must be int, not ''"),
    ('--n_layer=none', "n_layer must be int, not 'none'"),
    ('--seed=x', "seed must be int|none, not 'x'"),
    ('--bias=1', "bias must be true|false, not '1'"),
    (f'--n_layer={2**63}', f'n_layer must fit 64 bits, not {2**63}'),
    ('--dropout=nan', 'dropout must be finite, not nan'),
    ('--dropout=-1e999', 'dropout must be finite, not -inf'),
    ('--wpe=rop', "wpe must be learned|rope|none, not 'rop'; did you mean rope?"),
    ('--wpe=NONE', "wpe must be learned|rope|none, not 'NONE'; did you mean none?"),
    ('--compile=1', "compile must be true|false|auto, not '1'"),
    ('--every=2', "every must be 1|10, not '2'"),
    ('--compile', 'write --compile=true'), ('--n_layer', 'write --n_layer=value'),
    ('-n_layer=3', 'settings are written --name=value'), ('-', 'settings are written --name=value'),
    ('--', 'settings are written --name=value'), ('--=3', 'settings are written --name=value'),
    ('--dropout=1.5', 'dropout is 1.5: it must be in [0, 1).')])
def test_a_faulty_flag(flag, reason):
    assert problems(flag) == [f'{flag}: {reason}']


@pytest.mark.parametrize('text, line', [
    ('seed = 1\n\nn_layr = 3', 'c.py:3: unknown setting n_layr; did you mean n_layer?'),
    ('if True:\n    n_layr: int = 3', 'c.py:2: unknown setting n_layr; did you mean n_layer?'),
    ('seed, n_layr = 1, 2', 'c.py:1: unknown setting n_layr; did you mean n_layer?'),
    ('n_layer = "3"', "c.py:1: n_layer must be int, not '3'"),
    ('n_layer = 3.0', 'c.py:1: n_layer must be int, not 3.0'),
    ('n_layer = True', 'c.py:1: n_layer must be int, not True'),
    ('every = True', 'c.py:1: every must be 1|10, not True'),
    ('bias = 1', 'c.py:1: bias must be true|false, not 1'),
    ('dropout = True', 'c.py:1: dropout must be float, not True'),
    ('dropout = float("nan")', 'c.py:1: dropout must be finite, not nan'),
    ('dropout = 10 ** 400', 'c.py:1: dropout must be finite, not 1' + 59 * '0'),
    ('dropout = float', "c.py:1: dropout must be float, not <class 'float'>"),
    ('start = None', 'c.py:1: start must be str, not None'),
    ('wpe = ["rope"]', "c.py:1: wpe must be learned|rope|none, not ['rope']; did you mean rope?"),
    ('seed = 1\nstart = "a"\nseed = 2', 'c.py:3: seed is set twice, first on line 1'),
    ('dropout = 2', 'c.py:1: dropout is 2.0: it must be in [0, 1).'),
    ('seed = 1\nn_layer = = 2', 'c.py:2: invalid syntax'),
    ('seed = 1\n  n_layer = 2', 'c.py:2: unexpected indent'),
    ('seed = 1\nn_layer = nope', "c.py:2: NameError: name 'nope' is not defined"),
    ('def f():\n    raise OSError("a\\nb")\nf()', 'c.py:2: OSError: a b'),
    ('import json\n\njson.loads("{")', 'c.py:3: JSONDecodeError: ...'),
    ('import json as start', 'c.py: start must be str, not <module ...'),
    ('from no.such import *', "c.py:1: ModuleNotFoundError: No module named 'no'"),
    ('exit(3)', 'c.py:1: SystemExit: 3'),
    (b'seed = 1\nstart = "caf\xe9"', 'c.py:2: (unicode error) ...'),
    (b'# caf\xe9', 'c.py...'), (b'seed = 1\0', 'c.py...')])
def test_a_faulty_file(write, text, line):
    [got] = problems(write('c.py', text))
    assert got.startswith(line[:-3]) if line.endswith('...') else got == line  # the rest is Python's


def test_files_that_cannot_be_read(write, tmp_path):
    (tmp_path / 'folder.py').mkdir()
    missing, folder = problems('nope.py', 'folder.py')
    assert missing == 'nope.py: No such file or directory' and folder.startswith('folder.py: ')


@pytest.mark.parametrize('name, text, line', [
    ('typo', 'seed = 1\nn_layr = 2', 'faulty/more.py: unknown setting n_layr; did you mean n_layer?'),
    ('fails', 'seed = 1\nseed = 1 / 0', '{}/faulty/fails.py:2: ZeroDivisionError: division by zero'),
    ('syntax', 'seed = (', "{}/faulty/syntax.py:1: '(' was never closed")])
def test_a_fault_of_an_imported_config(write, tmp_path, name, text, line):
    write(f'faulty/{name}.py', text)
    assert problems(write('faulty/more.py', f'from faulty.{name} import *\nstart = ""')) == [line.format(tmp_path)]


def test_all_problems_are_told_at_once(write):
    a = write('a.py', 'n_layr = 1\ndropout = 2\nwpe = "rop"\nseed = 1\nseed = 2')
    assert problems(a, 'nope.py', '--bias=y\nes', '--start', '--stop=a', '--stop=b', '--sed=3') == [
        'a.py:5: seed is set twice, first on line 4',
        'nope.py: No such file or directory',
        '--start: write --start=value',
        '--stop=b: stop is given twice, first by --stop=a',
        'a.py:1: unknown setting n_layr; did you mean n_layer?',
        "a.py:3: wpe must be learned|rope|none, not 'rop'; did you mean rope?",
        "--bias=y es: bias must be true|false, not 'y\\nes'",
        '--sed=3: unknown setting sed; did you mean seed?',
        'a.py:2: dropout is 2.0: it must be in [0, 1).']
    assert problems('--start=refused', '--seed=1') == [
        '--start=refused: start must not be refused.', '--seed=1: seed is in this too.']


def test_a_file_that_sets_nothing(write):
    for text in ('', '# seed = 1', 'import math\nfrom pathlib import Path\n_n = 1\ndef f(): pass\n'):
        assert problems(write('a.py', text)) == ['a.py is no config file: it sets nothing']


def test_a_problem_of_two_settings_stands_where_the_first_does(write):
    assert problems(write('a.py', 'n_layer = 5'), '--n_head=2') == ['a.py:1: n_layer=5 must be a multiple of n_head=2.']
    assert problems('--n_layer=5', '--n_head=2') == ['--n_layer=5 must be a multiple of n_head=2.']  # the flag once
    assert problems('--n_head=5') == ['n_layer=12 must be a multiple of n_head=5.']
    assert problems('--n_head=five', '--n_layer=7') == ["--n_head=five: n_head must be int, not 'five'"]


# ---- laws

LAW = settings(deadline=None, database=None)
TEXT = st.text('aZ_09.=-+ \n\t\r\x00\x1c\'"#\\é☃\u2028\ud800')
VALUES = {'n_layer': st.integers(1, 2**63 - 1), 'dropout': st.floats(0, 1, exclude_max=True), 'bias': st.booleans(),
          'compile': st.booleans() | st.just('auto'), 'wpe': st.sampled_from(['learned', 'rope', 'none']),
          'seed': st.none() | st.integers(1 - 2**63, 2**63 - 1), 'start': TEXT, 'stop': st.none() | TEXT,
          'every': st.sampled_from([1, 10])}
FLAGS = st.builds('{}{}{}{}'.format, st.sampled_from(['--', '-', '']),
                  st.sampled_from([*VALUES, 'n_layr', '', 'é']) | TEXT, st.sampled_from(['=', '', ' ']),
                  st.sampled_from(['nan', 'none', 'TRUE', '1e999', '9' * 5000, '-0', "<class 'float'>"]) | TEXT)


@LAW
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_is_written_is_what_is_read(values):
    config = read(*[f'--{name}={value}' for name, value in values.items()])
    assert repr(config) == repr(Settings(**values))  # repr: to the last bit, and True is not 1


@LAW
@given(st.lists(FLAGS | TEXT | TEXT.map('{}.py'.format)))
@example(['--start', '-h'])
def test_any_command_line_gives_a_config_or_a_value_error(argv):
    try:
        config, rest = configure(Settings, argv)
    except ValueError as error:
        assert all(line.strip() for line in str(error).splitlines())
    except SystemExit as end:
        assert end.code == 0 and ('-h' in argv or '--help' in argv)
    else:
        assert not config.problems() and set(rest) <= set(argv)


# ---- --help and run

@pytest.mark.parametrize('about, usage', [
    ('', ''), ('Trains: python x.py config/a.py --n=1', ''), ('Samples: python x.py --start="O Romeo"', ''),
    ('Adds: python x.py NAME --input=PATH, or: python x.py b', ' NAME'),
    ('Joins: python x.py out/a out/b', ' out/a out/b')])
def test_usage_names_the_positionals_of_the_example(about, usage, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['./x.py'])
    monkeypatch.setattr(sys.modules['__main__'], '__doc__', about)
    assert help_text(Shape).splitlines()[:2] == [f'usage: python x.py{usage} [config.py ...] [--name=value ...]', about]


def test_help_lists_every_field_under_its_class(capsys):
    with pytest.raises(SystemExit) as end:
        read('nope.py', '--zzz', '--help')
    text = capsys.readouterr().out
    assert end.value.code == 0 and max(map(len, text.splitlines())) <= 120
    assert ' '.join(text.split('\nShape:\n')[1].split()) == (
        '--n_layer=12 int blocks '
        '--wpe=learned learned|rope|none position scheme; exactly one is active, and only learned owns a parameter '
        '--dropout=0.0 float share of activations set to zero '
        "Settings: --n_head=1 int heads, stated anew --start=\\n str text; '#' is no comment "
        '--compile=auto true|false|auto use torch.compile --bias=True true|false in every Linear '
        '--seed=None int|none none: by the clock --stop=None str|none end of text --every=1 1|10 steps')


@pytest.fixture
def script(tmp_path):
    """Runs a small script in a process of its own: (exit code, stdout, stderr)."""
    (tmp_path / 'greet.py').write_text(r'''"""Greets somebody, politely.

Not part of the usage.
"""
import sys
from dataclasses import dataclass
from nanope.configurator import configure, run
from nanope.usage import help_text


@dataclass
class GreetConfig:
    name: str = 'you'  # whom — even “☃”
    times: int = 1  # how often


def main():
    config, rest = configure(GreetConfig, sys.argv[1:])
    for word in rest:
        raise {'interrupt': KeyboardInterrupt, 'bug': KeyError}[word]
    print(f'hello {config.name}\n' * config.times, end='')
    return 75 if config.times == 2 else None


if __name__ == '__main__':
    run(main)
''', encoding='utf-8')

    def script(command, encoding='utf-8'):
        env = {'PYTHONPATH': str(ROOT), 'PYTHONIOENCODING': encoding, 'PATH': '/usr/bin:/bin'}
        done = subprocess.run(command.replace('greet', f'{sys.executable} greet.py'), shell=True, cwd=tmp_path, env=env,
                              capture_output=True, encoding='utf-8', timeout=60)
        return done.returncode, done.stdout, done.stderr
    return script


def test_run_ends_with_the_right_code_and_words(script):
    assert script('greet') == (0, 'hello you\n', '')
    assert script('greet --times=2') == (75, 'hello you\nhello you\n', '')
    assert script('greet --tims=2 --times=x') == (
        2, '', 'error: --tims=2: unknown setting tims; did you mean times?\n'
               "       --times=x: times must be int, not 'x'\n")
    assert script('greet interrupt') == (130, '', '')
    assert script('greet bug')[2].startswith('Traceback')
    assert script('greet --times=100000 | head -n 1') == (0, 'hello you\n', '')
    assert script('greet >&-') == (0, '', '') and script('greet 2>&- | cat') == (0, 'hello you\n', '')
    assert script('greet --times=x >&- 2>&-') == (2, '', '') and script('greet --times=2 >&- 2>&-') == (75, '', '')
    assert script('greet --name=☃', encoding='ascii') == (0, 'hello \\u2603\n', '')
    code, out, err = script('greet --help')
    assert (code, err) == (0, '') and out.startswith('usage: python greet.py [config.py ...] [--name=value ...]\n'
                                                     'Greets somebody, politely.\n\nGreetConfig:\n')
    assert '  --name=you                        str         whom — even “☃”\n' in out


@pytest.mark.parametrize('error, line', [
    (FileNotFoundError(2, 'No such file or directory', 'a', None, 'b'), "No such file or directory: 'a' -> 'b'"),
    (OSError(28, 'No space left on device'), 'No space left on device'), (OSError('just text'), 'just text'),
    (ValueError('one\ntwo'), 'one\n       two')])
def test_run_tells_errors_without_a_traceback(error, line, capsys):
    def main():
        raise error
    with pytest.raises(SystemExit) as end:
        run(main)
    assert end.value.code == 2 and capsys.readouterr().err == f'error: {line}\n'
