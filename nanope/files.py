"""Files that are there whole or not at all, whenever the machine stops."""
import contextlib
import hashlib
import json
import math
import os
import shutil

from filelock import FileLock, Timeout


@contextlib.contextmanager
def naming(path):
    """Around work on a file: the errors of a full or failing disk do not say which one it was, so they get its path."""
    try:
        yield
    except OSError as error:
        error.filename = path if error.filename is None else error.filename
        raise


def sha256(path):
    with naming(path), open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def sampled_sha256(path, blocks=64, length=2**16):
    """The digest of that many blocks, evenly spread from the first to the last byte: read in a moment, however large the file.

    It tells another file and one of which a part is missing, not every flipped bit."""
    digest = hashlib.sha256()
    with naming(path), open(path, 'rb') as file:
        last = max(os.path.getsize(path) - length, 0)
        for n in range(blocks):
            file.seek(last * n // (blocks - 1))
            digest.update(file.read(length))
    return digest.hexdigest()


def make_folder(path):
    """A folder and those it stands in, unless they are there. Raises ValueError where a file is in the way."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        there = path
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        raise ValueError(f'{path} cannot be a folder, as {there} is a file: give another name') from None


def remove(path):
    """Delete a file, a link (never what it points to), or a folder with all that is in it."""
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


def check_room(what, memory, disk=0, folder='.'):
    """Raises ValueError where so many bytes are more than the memory of this machine, or than are free on the disk of a folder to be."""
    there = os.path.abspath(folder)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    installed = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') if hasattr(os, 'sysconf') else math.inf
    for kind, need, have in (('memory', memory, installed), ('disk', disk, shutil.disk_usage(there).free)):
        if need > have:
            raise ValueError(f'{what} takes {need / 1e9:,.1f} GB of {kind} at least, and there are {have / 1e9:,.1f}: use less')


def lock_folder(folder, doing, wait=False):
    """Make a folder ours until the returned lock is let go or this process ends. Raises ValueError where another has it, or waits."""
    make_folder(folder)
    lock = FileLock(os.path.join(folder, '.lock'))
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        who = f'another process{owner(lock.lock_file)}'
        raise ValueError(f'{folder} is being {doing} by {who}: wait for it, or use another folder') from None
    return lock


def guard(folder):
    """A function that raises OSError once a folder that this process has locked is not that one any more: it was removed or renamed, or
    its .lock was, so that another process may have made and locked one of the same name."""
    path = os.path.join(folder, '.lock')

    def identity():
        found = os.stat(path) if os.path.exists(path) else None
        return found and (found.st_dev, found.st_ino)

    locked = identity()

    def check():
        if identity() != locked:
            raise OSError(f'{folder} is not the folder any more that was locked at the start (it or {path} was removed or replaced), and '
                          'another process may be using it: stopped, with nothing more written there')
    return check


def owner(lock_file):
    """' (its id is 123)' of the process that has locked a file, or '' where it cannot be told, as off Linux."""
    try:
        with open('/proc/locks', encoding='utf-8') as file:
            locks = [line.split() for line in file]
        inode = os.stat(lock_file).st_ino
        return ''.join(f' (its id is {words[4]})' for words in locks if words[1] == 'FLOCK' and words[5].endswith(f':{inode}'))
    except (OSError, IndexError):
        return ''


def brief(error):
    """An exception in one short line, without the pages that a compiler or a server adds."""
    return f'{type(error).__name__}: {str(error).strip()}'.partition('\n')[0][:200]


def sync(path):
    """Ask the system to put a file, or the entries of a folder, on the disk."""
    if os.path.isdir(path) and os.name == 'nt':
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDWR if os.path.isfile(path) and os.name == 'nt' else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path):
    """The JSON object (dict) that a file holds. Raises ValueError, naming the file, where it holds anything else."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f'{path} is not a file')  # a pipe or a device might never end
    try:
        with naming(path), open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is not JSON ({type(error).__name__}: {error})') from None
    if not isinstance(content, dict):
        raise ValueError(f'{path} is not a JSON object')
    return content


def write_json(path, content):
    """Replace a JSON file in one step: a reader finds the old or the new one, never half of one."""
    with naming(path), open(f'{path}.tmp', 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f'{path}.tmp', path)
    sync(os.path.dirname(path) or '.')
