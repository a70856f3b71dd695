"""Text <-> token ids: characters, or GPT-2's byte pairs. to_json() travels in meta.json and in every checkpoint.

Both kinds have one token that no text can produce, the separator, which stands between documents. It is written
'<|endoftext|>', but only encode_prompt() reads it so: in encode() these are thirteen ordinary characters.
"""
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np

SEPARATOR = '<|endoftext|>'
VOCAB_BPE = Path(__file__).parent.parent / 'data' / 'gpt2' / 'vocab.bpe'
VOCAB_BPE_SHA256 = '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5'
# How GPT-2 cuts text into the pieces that it merges within; the possessive ++ cut like its own +, faster.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def from_json(json):
    """The tokenizer that a to_json() describes."""
    if json == {'kind': 'gpt2'}:
        return GPT2Tokenizer()
    if json.get('kind') == 'char' and isinstance(json.get('chars'), str):
        return CharTokenizer(json['chars'])
    raise ValueError(f'unknown tokenizer {str(json):.100}: its kind is neither char nor gpt2')


def default_prompt(tokenizer):
    """What a sample begins with where nothing else is asked for: a new line, where the vocabulary has one, else the separator."""
    return '\n' if '\n' in getattr(tokenizer, 'chars', '\n') else SEPARATOR


def dtype_for(vocab_size):
    """The smallest of the two types that hold every id of the vocabulary."""
    return np.dtype('uint16' if vocab_size <= 2**16 else 'uint32')


class CharTokenizer:
    """One token a character. A character's id is its place in `chars`, which is sorted; the separator comes last."""
    kind = 'char'

    def __init__(self, chars):
        if list(chars) != sorted(set(chars)):
            raise ValueError(f'the characters of a vocabulary must be sorted and differ: {chars!r:.100}')
        self.chars = chars
        self.separator = len(chars)
        self.vocab_size = len(chars) + 1
        self.dtype = dtype_for(self.vocab_size)
        codes = code_points(chars)
        self.ids = np.full(codes.max(initial=0) + 1, self.separator, dtype=self.dtype)  # by code point
        self.ids[codes] = np.arange(len(chars))

    def encode(self, text):
        """Ids, an array (len(text),). ValueError lists the characters that the vocabulary does not have."""
        codes = code_points(text)
        ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        ids[codes >= len(self.ids)] = self.separator
        if (ids == self.separator).any():
            unknown = Counter(chr(code) for code in codes[ids == self.separator])
            shown = ', '.join(f'{char!r} ({count}x)' for char, count in unknown.most_common(20))
            more = f' and {len(unknown) - 20} more' if len(unknown) > 20 else ''
            raise ValueError(f'the vocabulary of {len(self.chars)} characters does not have {shown}{more}; '
                             'leave them out, or prepare data that has them, or prepare with --tokenizer=gpt2')
        return ids

    def encode_prompt(self, text):
        parts = [self.encode(part).tolist() for part in text.split(SEPARATOR)]
        return parts[0] + [id for part in parts[1:] for id in [self.separator, *part]]

    def decode(self, ids):
        return ''.join(self.chars[id] if id != self.separator else SEPARATOR for id in np.asarray(ids, dtype=np.int64))

    def decode_bytes(self, ids):
        return self.decode(ids).encode('utf-8', 'surrogatepass')

    def byte_lengths(self):
        """UTF-8 bytes of each token, int64 (vocab_size,); the separator has 0: it is no part of the text."""
        return np.array([len(char.encode('utf-8', 'surrogatepass')) for char in self.chars] + [0])

    def to_json(self):
        return {'kind': 'char', 'chars': self.chars}


class GPT2Tokenizer:
    """Byte pairs of GPT-2 (Radford et al. 2019), run by tiktoken: 50,256 tokens and the separator. Encodes any text."""
    kind = 'gpt2'

    def __init__(self):
        import tiktoken
        ranks = gpt2_ranks()
        self.tokens = list(ranks)  # bytes of each token, by id
        self.separator = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.dtype = dtype_for(self.vocab_size)
        self.bpe = tiktoken.Encoding('gpt2', pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                     special_tokens={SEPARATOR: self.separator}, explicit_n_vocab=self.vocab_size)

    def encode(self, text):
        return self.bpe.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)  # special strings are ordinary text

    def encode_prompt(self, text):
        return self.bpe.encode(text, allowed_special={SEPARATOR})

    def decode(self, ids):
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def decode_bytes(self, ids):
        return self.bpe.decode_bytes(np.asarray(ids, dtype=np.int64).tolist())

    def byte_lengths(self):
        """UTF-8 bytes of each token, int64 (vocab_size,); the separator has 0: it is no part of the text."""
        return np.array([len(token) for token in self.tokens] + [0])

    def to_json(self):
        return {'kind': 'gpt2'}


def code_points(text):
    """Unicode code points: int64 (len(text),)."""
    return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4').astype(np.int64)


def byte_letters():
    """{letter: byte}, in the order of GPT-2's ids. Its files write every byte as a letter that can be seen: the printable bytes of Latin-1
    as themselves, the others as the letters from U+0100 on."""
    seen = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != ' ']
    order = seen + [byte for byte in range(256) if byte not in seen]
    return {chr(byte) if rank < len(seen) else chr(256 + rank - len(seen)): byte for rank, byte in enumerate(order)}


def gpt2_ranks():
    """{bytes: id} of GPT-2's 50,256 tokens, from its list of merges alone, in the order of the ids.

    The ids begin with the single bytes; then each merge makes the next one.
    """
    merges = VOCAB_BPE.read_bytes()
    if hashlib.sha256(merges).hexdigest() != VOCAB_BPE_SHA256:
        raise ValueError(f'{VOCAB_BPE} is not the file of GPT-2 any more: restore it (git checkout {VOCAB_BPE.name})')
    byte_of = byte_letters()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.decode('utf-8').splitlines()[1:]:  # the first line says #version
        ranks[bytes(byte_of[letter] for letter in line.replace(' ', ''))] = len(ranks)
    return ranks


def hugging_face_json(tokenizer):
    """The content of tokenizer.json, the format of Hugging Face's `tokenizers`, as a dict.

    The separator is read as one wherever it is spelt, as encode_prompt() does. A character that the vocabulary does not have is an
    error there, too, as there is no unknown token."""
    separator = {'id': tokenizer.separator, 'content': SEPARATOR, 'special': True, 'normalized': False, 'single_word': False,
                 'lstrip': False, 'rstrip': False}
    if tokenizer.kind == 'gpt2':
        merges = VOCAB_BPE.read_text('utf-8').splitlines()[1:]
        words = [*byte_letters(), *(merge.replace(' ', '') for merge in merges), SEPARATOR]
        bytes_as_letters = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
        parts = {'pre_tokenizer': bytes_as_letters, 'decoder': bytes_as_letters,
                 'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': '', 'end_of_word_suffix': '',
                           'fuse_unk': False, 'byte_fallback': False, 'vocab': {word: i for i, word in enumerate(words)},
                           'merges': merges}}
    else:
        parts = {'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated', 'invert': False},
                 'decoder': {'type': 'Fuse'},
                 'model': {'type': 'WordLevel', 'unk_token': '',
                           'vocab': {word: i for i, word in enumerate([*tokenizer.chars, SEPARATOR])}}}
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [separator], 'normalizer': None,
            'post_processor': None, **parts}
