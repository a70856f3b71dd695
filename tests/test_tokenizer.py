"""Tokenizers against OpenAI's published digest, an independent implementation, and the laws of encoding."""
import base64
import hashlib
import json
import string
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanope import tokenizer
from nanope.tokenizer import SEPARATOR, CharTokenizer, GPT2Tokenizer, from_json

calm = settings(deadline=None)  # a busy machine is no failure
ALPHABET = ''.join(sorted(set(string.printable + 'éß日本語🎉\u200d\u2028')))
CHAR = CharTokenizer(ALPHABET)
MIXED = st.text(st.sampled_from(ALPHABET + '\n  ')) | st.text()  # also what is rare: any plane, joiners, odd spaces


@pytest.fixture(scope='module')
def gpt2():
    return GPT2Tokenizer()


def test_gpt2_is_openais(gpt2):
    assert (gpt2.vocab_size, gpt2.separator, gpt2.dtype) == (50257, 50256, np.uint16)
    assert gpt2.encode('Hello world').tolist() == [15496, 995]
    assert gpt2.encode(' the\n').tolist() == [262, 198]
    assert gpt2.encode(SEPARATOR).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    # tiktoken's r50k_base.tiktoken lists the same tokens; tiktoken_ext/openai_public.py holds this digest of it
    listing = b''.join(base64.b64encode(token) + b' %d\n' % id for id, token in enumerate(gpt2.tokens))
    assert hashlib.sha256(listing).hexdigest() == '306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930'


@pytest.fixture(scope='module')
def peer():
    """The library behind transformers, with the same merges but its own way to cut and merge; its ids are arbitrary."""
    library = pytest.importorskip('tokenizers')
    merges = [tuple(line.split(' ')) for line in tokenizer.VOCAB_BPE.read_text('utf-8').splitlines()[1:]]
    names = library.pre_tokenizers.ByteLevel.alphabet() + [first + second for first, second in merges]
    peer = library.Tokenizer(library.models.BPE({name: id for id, name in enumerate(names)}, merges))
    peer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return peer


@calm
@given(text=MIXED)
@example(text=(tokenizer.VOCAB_BPE.parent.parent / 'shakespeare' / 'plays' / 'hamlet.txt').read_text('ascii')[:20_000])
def test_gpt2_cuts_as_its_peer(gpt2, peer, text):
    lengths = [len(name) for name in peer.encode(text).tokens]  # a letter stands for a byte
    assert lengths == gpt2.byte_lengths()[gpt2.encode(text)].tolist()


@calm
@given(text=MIXED)
def test_gpt2_round_trip(gpt2, text):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert ids.dtype == np.uint16 and (ids < gpt2.separator).all()
    assert gpt2.byte_lengths()[ids].sum() == len(text.encode())


@calm
@given(text=st.text(st.sampled_from(ALPHABET)))
def test_char_round_trip(text):
    ids = CHAR.encode(text)
    assert CHAR.decode(ids) == text and len(ids) == len(text)
    assert CHAR.decode_bytes(ids) == text.encode()
    assert CHAR.byte_lengths()[ids].sum() == len(text.encode())


@calm
@given(parts=st.lists(st.text(st.sampled_from(ALPHABET.replace('<', ''))), min_size=1))
def test_prompt_reads_separators(gpt2, parts):
    for tok in (CHAR, gpt2):
        ids = tok.encode_prompt(SEPARATOR.join(parts))
        assert ids.count(tok.separator) == len(parts) - 1
        assert tok.decode(ids) == SEPARATOR.join(parts)
        assert tok.separator not in tok.encode(SEPARATOR.join(parts))  # in a text it is ordinary


def test_separator_has_no_bytes(gpt2):
    for tok in (CHAR, gpt2):
        assert tok.byte_lengths()[tok.separator] == 0
        assert tok.byte_lengths().shape == (tok.vocab_size,) and tok.byte_lengths().dtype == np.int64
        assert tok.decode_bytes([tok.separator]) == SEPARATOR.encode()
    assert gpt2.decode(gpt2.encode('🎉')[:1]) == '\ufffd'  # half a character


def test_json_round_trip(gpt2):
    for tok in (CHAR, gpt2, CharTokenizer('')):
        again = from_json(json.loads(json.dumps(tok.to_json())))
        assert (again.kind, again.vocab_size, again.to_json()) == (tok.kind, tok.vocab_size, tok.to_json())


@pytest.mark.parametrize('bad', [{}, {'kind': 'word'}, {'kind': 'char'}, {'kind': 'char', 'chars': ['a']}])
def test_json_of_nothing_known(bad):
    with pytest.raises(ValueError, match='unknown tokenizer'):
        from_json(bad)


@pytest.mark.parametrize('chars', ['ba', 'aa'])
def test_vocabulary_is_sorted(chars):
    with pytest.raises(ValueError, match='sorted'):
        CharTokenizer(chars)


def test_unknown_characters_are_listed():
    with pytest.raises(ValueError) as error:
        CharTokenizer('abc').encode('aé~~b')
    assert "'~' (2x)" in str(error.value) and "'é' (1x)" in str(error.value) and '\n' not in str(error.value)
    with pytest.raises(ValueError, match='and 6 more'):
        CharTokenizer('').encode(string.ascii_lowercase)


def test_large_vocabulary_needs_four_bytes():
    chars = ''.join(map(chr, range(0x10000, 0x10000 + 2**16)))
    assert CharTokenizer(chars[1:]).dtype == np.uint16
    assert CharTokenizer(chars).dtype == np.uint32
    assert CharTokenizer(chars).encode(chars[-1]).tolist() == [2**16 - 1]


def test_damaged_merges_are_refused(monkeypatch, tmp_path):
    damaged = tmp_path / 'vocab.bpe'
    damaged.write_bytes(tokenizer.VOCAB_BPE.read_bytes().replace(b'\n', b'\r\n'))
    monkeypatch.setattr(tokenizer, 'VOCAB_BPE', damaged)
    with pytest.raises(ValueError, match='not the file of GPT-2'):
        GPT2Tokenizer()


def test_characters_need_no_tiktoken():
    code = 'import sys, nanope.tokenizer as t; t.CharTokenizer("ab").encode("ba"); sys.exit("tiktoken" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0
