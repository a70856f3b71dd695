"""Files that are there whole or not at all, whenever the machine stops."""
import hashlib
import json
import os


def sha256(path):
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def sync(path):
    """Ask the system to put a file, or the entries of a folder, on the disk."""
    if os.path.isdir(path) and os.name == 'nt':
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDWR if os.path.isfile(path) and os.name == 'nt' else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path, content):
    """Replace a JSON file in one step: a reader finds the old or the new one, never half of one."""
    with open(f'{path}.tmp', 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f'{path}.tmp', path)
    sync(os.path.dirname(path) or '.')
