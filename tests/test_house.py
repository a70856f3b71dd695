"""The house: which file may import which, what no file may do, and that every config and script at least starts."""
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nanope.configurator import configure
from reliability import FAULTS, gpus
from runs import ROOT
from train import TrainConfig

SCRIPTS = sorted(path.stem for path in ROOT.glob('*.py') if path.stem != 'model')
OTHERS = 'finetune_shakespeare', 'shakespeare_fast', 'gpt2_muon'
OWN = subprocess.run(['git', 'ls-files', '--others', 'config'], cwd=ROOT, capture_output=True, text=True).stdout.split()  # a user's
CONFIGS = sorted({path.stem for path in ROOT.glob('config/*.py') if f'config/{path.name}' not in OWN} - {*OTHERS})  # by scheme
LAZY = {'datasets', 'wandb', 'matplotlib', 'tiktoken', 'transformers', 'huggingface_hub', 'tokenizers'}  # a run may not need them


def tracked():
    """The files that belong to the repository."""
    listing = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT, capture_output=True)
    if listing.returncode:
        pytest.skip('not a git repository')
    return [path for name in listing.stdout.decode().split('\0') if name and (path := ROOT / name).is_file()]


def python_files(pattern):
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text('utf-8'))) for path in sorted(ROOT.glob(pattern))]


def imports(tree, inside_functions=True):
    """Full names of the modules that a file imports. inside_functions=False: those that merely importing it imports."""
    names, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)} if not node.level else {'.'}
        if inside_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return names


def tops(names):
    return {name.partition('.')[0] for name in names}


# ---- floors ----------------------------------------------------------------------------------------------------------

def test_imports_point_downwards():
    """scripts -> nanope/ and model -> libraries."""
    above = {*SCRIPTS, 'tests', 'runs', 'small', 'reliability', 'conftest'}
    for pattern, forbidden in (('*.py', above), ('nanope/*.py', above | {'config'}), ('data/**/*.py', above)):
        for name, tree in python_files(pattern):
            assert not tops(imports(tree)) & forbidden and '.' not in imports(tree), name
    for name, tree in python_files('config/*.py'):
        assert tops(imports(tree)) <= {'config'}, name


def test_model_can_be_copied_out():
    (_, tree), = python_files('model.py')
    assert tops(imports(tree)) <= sys.stdlib_module_names | {'torch'}


def test_packages_that_a_run_may_not_need_are_imported_where_they_are_used():
    for pattern in ('*.py', 'nanope/*.py', 'config/*.py'):
        for name, tree in python_files(pattern):
            assert not tops(imports(tree, inside_functions=False)) & LAZY, name


def test_these_tests_see_what_they_look_for():
    tree = ast.parse('import a.b\nfrom c import d\nif x:\n import e\nclass F:\n import g\ndef h():\n import i\nasync def j():\n import k')
    assert imports(tree, inside_functions=False) == {'a.b', 'c', 'c.d', 'e', 'g'} and tops(imports(tree)) == set('acegik')
    for code in ('import pickle', 'from marshal import loads', 'import shelve as s', 'eval("1")', 'exec("1")',
                 'builtins.exec("1")', '__import__("os")', 'np.load(f, allow_pickle=True)', 'np.load(f, allow_pickle=x)', 'torch.load(f)',
                 'torch.load(f, weights_only=False)', 'torch.load(f, weights_only=x)',
                 'from torch import load', 'load(f, weights_only=False)', 'torch.save(x, f)', 'pd.read_pickle(f)',
                 'yaml.unsafe_load(f)', 'f(trust_remote_code=True)'):
        assert dangers(ast.parse(code)), code
    for code in ('model.eval()', 'torch.compile(model)', 'torch.load(f, weights_only=True)', 'np.load(f, allow_pickle=False)',
                 'json.load(f)', 'a.load_state_dict(x)'):
        assert not dangers(ast.parse(code)), code


# ---- nothing that runs what it reads ---------------------------------------------------------------------------------

def dangers(tree):
    """Places of a file where data could become code."""
    found = tops(imports(tree)) & {'pickle', 'cPickle', 'dill', 'cloudpickle', 'joblib', 'marshal', 'shelve'}
    found |= imports(tree) & {'torch.load', 'torch.save', 'numpy.load'}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.removeprefix('builtins.') in ('eval', 'exec', '__import__') or function == 'torch.save':
                found.add(function)
            if function == 'torch.load' and 'weights_only=True' not in map(ast.unparse, node.keywords):
                found.add(function)
            if function.rpartition('.')[2] in ('read_pickle', 'to_pickle', 'unsafe_load', 'full_load'):
                found.add(function)
        if isinstance(node, ast.keyword) and node.arg in ('allow_pickle', 'trust_remote_code') and ast.unparse(node.value) != 'False':
            found.add(node.arg)
        if isinstance(node, ast.keyword) and node.arg == 'weights_only' and ast.unparse(node.value) != 'True':
            found.add(node.arg)
    return found


def test_no_file_reads_or_writes_a_pickle_or_evaluates_text():
    files = [path for path in tracked() if path.suffix == '.py']
    assert len(files) > 20
    for path in files:
        allowed = {'torch.save'} if path.parent.name == 'tests' else set()  # what nanoGPT writes, to be read or refused
        assert dangers(ast.parse(path.read_text('utf-8'))) <= allowed, path


def test_the_page_on_reliability_names_tests_that_exist():
    there = {f'{Path(name).name}::{node.name}' for name, tree in python_files('tests/test_*.py') for node in tree.body
             if isinstance(node, ast.FunctionDef)}
    named = {test for *_, tests in FAULTS for test in tests.split()}
    assert named <= there and {'test_parallel.py', 'test_shard.py'} <= {test.partition('::')[0] for test in named}


@pytest.mark.parametrize('n, told', [(0, 'no GPU'), (1, '1 GPU (X)'), (2, '2 GPUs (X)')])
def test_the_page_on_reliability_says_which_gpus_there_were(monkeypatch, n, told):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: n), monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: 'X')
    assert gpus() == told


def test_text_is_utf_8_on_every_system():
    """Whoever opens a file as text says so: Windows would take another encoding."""
    for pattern in ('*.py', 'nanope/*.py', 'data/**/*.py'):
        for name, tree in python_files(pattern):
            for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
                function, words = ast.unparse(call.func), ast.unparse(call)
                binary = re.search(r"'[rwa]\+?b\+?'", words) or 'os.devnull' in words
                if function == 'open' or function.rpartition('.')[2] in ('read_text', 'write_text') and function != 'corpus.read_text':
                    assert binary or 'encoding=' in words or "'utf-8'" in words or "'ascii'" in words, f'{name}: {words}'


@pytest.mark.parametrize('name', SCRIPTS)
def test_a_script_can_be_imported(name):
    """Its last statement is the guard without which Windows and macOS, which spawn processes, would run it again in each."""
    (_, tree), = python_files(f'{name}.py')
    assert ast.unparse(tree.body[-1]).splitlines()[0] == "if __name__ == '__main__':"


# ---- configs, requirements, lines, scripts ---------------------------------------------------------------------------

@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_differs_from_its_base_in_scheme_and_folder_alone(name):
    family, _, wpe = name.partition('_')
    base, own = (asdict(configure(TrainConfig, [str(ROOT / f'config/{each}.py')])[0]) for each in (f'{family}_learned', name))
    assert own == {**base, 'wpe': wpe, 'out_dir': f'out/{name}'}
    if wpe != 'learned':                                          # what they share stands once
        (_, tree), = python_files(f'config/{name}.py')
        assert {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} == {'wpe', 'out_dir'}
    families = {config.partition('_')[0] for config in CONFIGS}
    assert {'gpt2', 'shakespeare'} <= families
    assert set(CONFIGS) >= {f'{each}_{scheme}' for each in families for scheme in ('learned', 'sinusoidal', 'rope', 'none')}


@pytest.mark.parametrize('name', OTHERS)
def test_a_config_of_its_own_kind_is_valid(name):
    config, rest = configure(TrainConfig, [str(ROOT / f'config/{name}.py')])
    assert rest == [] and config.out_dir == f'out/{name}'


def test_requirements_are_pinned():
    for path in ROOT.glob('requirements*.txt'):
        lines = [line.partition('#')[0].strip() for line in path.read_text('utf-8').splitlines()]
        assert all(re.fullmatch(r'[\w.\[\]-]+==[\w.!+]+|-r requirements\.txt|', line) for line in lines), path


def test_no_line_is_longer_than_140_characters():
    found = []
    for path in tracked():
        try:
            lines = path.read_bytes().decode('utf-8').splitlines()
        except UnicodeDecodeError:                                # a picture
            continue
        long = [i for i, line in enumerate(lines, 1) if len(line) > 140 and line[0] != '|']  # a table's row cannot be wrapped
        found += [f'{path.relative_to(ROOT)}:{i}' for i in long]
    assert not found, found


@pytest.mark.parametrize('page', ['README.md', *(f'docs/{path.name}' for path in sorted(ROOT.glob('docs/*.md')))])
def test_commands_of_a_page_are_taken(page, monkeypatch):
    """Their settings exist and fit; what they name need not be there."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text('utf-8').replace('\\\n', ' ')
    commands = [shlex.split(line, comments=True) for line in re.findall(r'^ +(?:\$ )?((?:python|torchrun) .*)', text, re.MULTILINE)]
    commands = [words for words in commands if '-m' not in words and '-c' not in words]
    assert len(commands) > 10 or page != 'README.md'
    for words in commands:
        script = next(word for word in words if word.endswith('.py'))
        if script.removesuffix('.py') in SCRIPTS:
            module = importlib.import_module(script.removesuffix('.py'))
            config, = [each for name, each in vars(module).items() if name == f'{script[:-3].capitalize()}Config']
            args = [word for word in words[words.index(script) + 1:] if not re.search(r'\$|=N$', word)]
            args = [word for word in args if not word.endswith('.py') or (ROOT / word).exists()]
            configure(config, [arg for arg in args if not arg.endswith('.py')] if script == 'compare.py' else args)


@pytest.mark.parametrize('name', SCRIPTS)
def test_help_and_what_a_script_imports_at_start(name, tmp_path):
    done = subprocess.run([sys.executable, '-X', 'importtime', ROOT / f'{name}.py', '--help'], cwd=tmp_path, capture_output=True,
                          encoding='utf-8', env={**os.environ, 'PYTHONIOENCODING': 'utf-8'})
    out, err = done.stdout, done.stderr
    imported = [line.rpartition('|')[2].strip() for line in err.splitlines() if line.startswith('import time:')]
    about = ast.get_docstring(ast.parse((ROOT / f'{name}.py').read_text('utf-8'))).splitlines()[0]
    assert done.returncode == 0 and len(imported) == len(err.splitlines()), err
    assert 'nanope.configurator' in imported and not tops(imported) & LAZY  # neither do the libraries
    assert f'usage: python {name}.py' in out and about in out and max(map(len, out.splitlines())) <= 140
    assert len(re.findall(r'^  --\w+=', out, re.MULTILINE)) >= 4
    assert list(tmp_path.iterdir()) == []
