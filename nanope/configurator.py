"""Typed settings of a script: the defaults of a dataclass < config files, left to right < --name=value flags."""

import ast
import difflib
import inspect
import os
import re
import runpy
import signal
import sys
from typing import Literal, get_args, get_origin, get_type_hints


def configure(cls, argv):
    """(config, rest) from sys.argv[1:]: an instance of the dataclass cls, and the positionals that are no .py files.

    ValueError lists every problem, one a line: where it stands, what is right. `--help` prints and exits.
    """
    if '-h' in argv or '--help' in argv:
        from nanope.usage import help_text
        print(help_text(cls), flush=True)
        sys.exit(0)
    flags = [arg for arg in argv if arg.startswith('-')]
    files = [arg for arg in argv if arg.endswith('.py') and arg not in flags]
    hints, problems = get_type_hints(cls), []
    settings = [setting for path in files for setting in read_file(path, hints, problems)]
    settings += read_flags(flags, hints, problems)
    values, origins, faulty = {}, {}, set()
    for where, name, candidates in settings:  # a later one wins
        try:
            values[name], origins[name] = fit(name, candidates, hints), f'{where}: '
        except ValueError as error:
            problems.append(f'{where}: {error}')
            faulty.add(name)
    try:
        config = cls(**values)
        complaints = config.problems() if hasattr(config, 'problems') else []
    except ValueError as error:  # from __post_init__
        complaints = str(error).splitlines()
    for complaint in complaints:
        named = [word for word in re.findall(r'\w+', complaint) if word in hints] or ['']
        if faulty.isdisjoint(named):  # else it speaks of a default that the user meant to replace
            where = origins.get(named[0], '')
            starts_with_flag = where == f'--{complaint.partition(" ")[0]}: '
            problems.append(f'--{complaint}' if starts_with_flag else where + complaint)
    if problems:
        raise ValueError('\n'.join(' '.join(problem.split()) for problem in problems))
    return config, [arg for arg in argv if arg not in flags + files]


def read_file(path, hints, problems):
    """[(file:line, name, [value])] of the public names that a config file leaves behind."""
    try:
        with open(path, 'rb') as file:
            source = file.read()
        tree = ast.parse(source, path)
        source.decode('utf-8')  # what the parser overlooks in comments
        public = {name: value for name, value in runpy.run_path(path).items() if not name.startswith('_')}
    except (Exception, SystemExit) as error:
        problems.append(failure(path, error))
        return []
    lines, settings = {}, []
    for node in ast.walk(tree):  # breadth first
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in lines and node.id in public and node.col_offset == 0:  # `if` and `else` may both set it
                problems.append(f'{path}:{node.lineno}: {node.id} is set twice, first on line {lines[node.id]}')
            lines[node.id] = node.lineno
    for name, value in public.items():
        if name in hints or not (inspect.ismodule(value) or callable(value)):
            settings.append((f'{path}:{lines[name]}' if name in lines else path, name, [value]))
    if not settings:
        problems.append(f'{path} is no config file: it sets nothing')
    return settings


def failure(path, error):
    """One line on what went wrong while a config file was read or run."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f'{error.filename}:{error.lineno}: {error.msg}'
    folder = os.path.dirname(os.path.abspath(path))  # the innermost line in a config, which may be an imported one
    for frame in reversed(inspect.getinnerframes(error.__traceback__)):
        if frame.filename.endswith('.py') and os.path.dirname(os.path.abspath(frame.filename)) == folder:
            return f'{frame.filename}:{frame.lineno}: {type(error).__name__}: {error}'
    return f'{path}: {error.strerror if isinstance(error, OSError) else error}'


def read_flags(flags, hints, problems):
    """[(flag, name, candidates)] of flags `--name=word`: the values that the word may stand for."""
    settings = {}
    for flag in flags:
        name, equals, word = flag.removeprefix('--').partition('=')
        if not flag.startswith('--') or not name:
            problems.append(f'{flag:.60}: settings are written --name=value')
        elif name in hints and not equals:
            problems.append(f'{flag}: write {flag}={"true" if bool in takes(hints[name])[0] else "value"}')
        elif name in settings:
            problems.append(f'{flag:.60}: {name} is given twice, first by {settings[name][0]}')
        else:
            settings[name] = f'{flag:.60}', name, meanings(word)
    return list(settings.values())


def meanings(word):
    """What a word of the command line may stand for: true, false or none, a number, and last itself."""
    values = [value for value in (True, False, None) if str(value).lower() == word.lower()]
    for number in int, float:
        try:
            values.append(number(word))
        except ValueError:
            pass
    return values + [word]


def fit(name, candidates, hints):
    """The first candidate that the field takes, as a float where a float is due. ValueError says what it takes."""
    if name not in hints:
        raise ValueError(f'unknown setting {name}{nearest(name, hints) or "; --help lists all"}')
    types, choices, text = takes(hints[name])
    for value in candidates:
        if float in types and type(value) in (int, float):
            if not abs(value) <= sys.float_info.max:
                raise ValueError(f'{name} must be finite, not {value!r:.60}')
            return float(value)
        if type(value) is int and int in types and abs(value) >= 2**63:  # torch and numpy could not take it
            raise ValueError(f'{name} must fit 64 bits, not {value!r:.60}')
        if type(value) in types or repr(value) in map(repr, choices):  # repr: True is not 1
            return value
    raise ValueError(f'{name} must be {text}, not {value!r:.60}{nearest(str(value), map(str, choices))}')


def restore(cls, values, where):
    """An instance of the dataclass cls from the values (dict) that `where` holds; names that it does not have are passed over.

    Raises ValueError where they do not fit."""
    hints = get_type_hints(cls)
    try:
        return cls(**{name: fit(name, [value], hints) for name, value in values.items() if name in hints})
    except ValueError as error:
        raise ValueError(f'{where}: {error}') from None


def idle(config, names, where):
    """A sentence for each of these settings that is not at its default: it does nothing there, and who gave it may not know."""
    return [f'{name}={getattr(config, name)} does nothing {where}: leave it out'
            for name in names if getattr(config, name) != getattr(type(config), name)]


def takes(hint):
    """(types, choices, both in words) of a field: `Literal['a'] | None` gives ([NoneType], ['a'], 'a|none')."""
    options = [option for part in get_args(hint) or [hint] for option in get_args(part) or [part]]
    types = [option for option in options if isinstance(option, type)]
    words = {bool: 'true|false', type(None): 'none'}
    text = '|'.join(words.get(option) or getattr(option, '__name__', str(option)) for option in options)
    return types, [option for option in options if option not in types], text


def nearest(word, names):
    return ''.join(f'; did you mean {name}?' for name in difflib.get_close_matches(word.lower(), names, n=1))


def catch_signals():
    """The first SIGINT or SIGTERM is noted in the returned list; a second one ends the process at once, as without a handler."""
    caught = []

    def note(number, frame):
        caught.append(signal.Signals(number).name)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, note)
    return caught


def run(main):
    """Calls main() and ends the process: bad input with exit code 2 and `error: …`, no traceback; Ctrl-C with 130."""
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:  # closed by whoever started us (`>&-`), which is no reason not to work
            setattr(sys, name, open(os.devnull, 'w'))
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # a character that a terminal lacks must not end a run
    try:
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough: what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except KeyboardInterrupt:
        code = 130
    except (ValueError, OSError) as error:
        text = re.sub(r'^\[\w+ -?\d+\] ', '', str(error))  # an OSError without its [Errno 2]
        print('error: ' + text.replace('\n', '\n       '), file=sys.stderr)
        code = 2
    except Exception as error:
        if not out_of_memory(error):
            raise
        print('error: out of memory: lower batch_size, eval_batch_size, block_size or n_embd (bench.py: rows)', file=sys.stderr)
        code = 2
    sys.exit(code)


def out_of_memory(error):
    """Whether Python, numpy, or torch on any device asked for more memory than there is."""
    return (isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError'
            or "can't allocate memory" in str(error))
