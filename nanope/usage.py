"""What --help prints: every setting of a script with its default, its type and the comment beside it."""
import inspect
import os
import re
import sys
import textwrap
import tokenize
from typing import get_type_hints

from nanope.configurator import takes


def help_text(cls):
    """The usage, and every field of cls under the class that declares it, base first."""
    about = (sys.modules['__main__'].__doc__ or '').strip().partition('\n')[0]
    command = f'python {os.path.basename(sys.argv[0])}'
    words = re.match(r'(?: [^-,\s][^,\s]*)*', about.partition(command)[2])[0].split()  # of its example, up to a flag
    words = [word for word in words if not word.endswith('.py')]
    lines = [' '.join(['usage:', command, *words, '[config.py ...] [--name=value ...]']), about]
    hints = get_type_hints(cls)
    owners = {name: klass for klass in reversed(cls.__mro__) for name in inspect.get_annotations(klass)}
    for klass in [klass for klass in reversed(cls.__mro__) if klass in owners.values()]:
        lines += ['', f'{klass.__name__}:']
        notes = comments(klass)
        for name in [name for name in owners if owners[name] is klass]:
            left = f'--{name}={getattr(cls, name)}'.replace('\n', r'\n')
            line = f'  {left:32}  {takes(hints[name])[2]:10}  {" ".join(notes.get(name, []))}'
            lines += textwrap.wrap(line, 116, subsequent_indent=' ' * 48, break_long_words=False)
    return '\n'.join(lines)


def comments(klass):
    """{field: [comments]} from the source: behind the field, and on the lines right below that are indented further."""
    found, field, row = {}, None, 0
    for token in tokenize.generate_tokens(iter(inspect.getsourcelines(klass)[0]).__next__):
        if token.type == tokenize.COMMENT:
            beside = re.match(r'(\s*)(\w+):', token.line)
            below = field and token.start[0] == row + 1 and token.start[1] > field.end(1)
            field, row = beside or (field if below else None), token.start[0]
            if field:
                found.setdefault(field[2], []).append(token.string.lstrip('# '))
    return found
