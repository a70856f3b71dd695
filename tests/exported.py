"""What the tests of import and export share: run folders of random models, and transformers' view of a folder."""
import contextlib
import io
import sys
from collections import namedtuple
from dataclasses import asdict

import pytest
import torch

from nanope import checkpoint
from nanope.configurator import run
from nanope.tokenizer import CharTokenizer
from small import build

CHARS = CharTokenizer('\n "' + ''.join(map(chr, range(65, 91))) + '\\' + ''.join(map(chr, range(97, 123))) + 'äé日🎉')
Done = namedtuple('Done', 'code out err')


def call(script, *args):
    """A script in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    try:
        sys.argv = ['script.py', *map(str, args)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            run(script.main)
    finally:
        sys.argv = argv
    return Done(stop.value.code, out.getvalue(), err.getvalue())


def refused(done, *words):
    """Exit code 2, nothing on stdout, and one line that says all the words."""
    assert done.code == 2 and done.out == '' and done.err.startswith('error: ') and done.err.count('\n') == 1, done
    assert all(str(word) in done.err for word in words), done.err


def save(folder, wpe, tokenizer=CHARS, step=7, **settings):
    """A run folder with one checkpoint of a random model, which is returned."""
    model = build(wpe, **{'vocab_size': tokenizer.vocab_size, **settings})
    state = {'config': asdict(model.config), 'tokenizer': tokenizer.to_json(), 'data_digest': 'abc'}
    checkpoint.save(str(folder), step, dict(model.named_parameters()), {}, state, {'dtype': 'float32'})
    return model


def theirs(folder, **settings):
    """transformers' model of a folder. Nothing may be missing in it, or left over."""
    from transformers import AutoModelForCausalLM
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(found.values()), found
    return model.eval()


@torch.no_grad()
def greedy(model, idx, steps):
    return torch.cat([idx, *model.generate(idx, steps, temperature=0)], dim=1)
