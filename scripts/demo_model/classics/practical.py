# mypy: ignore-errors
# ruff: noqa: E501 (asks are one line each; answers are plain on purpose)
"""Common requests of everyday programs: dictionaries, files, dates, JSON, decorators."""

import csv
import functools
import json
import os
import time
from collections.abc import Callable
from datetime import date, datetime


# ask: Merge two dictionaries | Combine two dictionaries into one | Merge two dicts
def merge_dicts(first: dict, second: dict) -> dict:
    """Return the two dictionaries merged."""
    result = dict(first)
    result.update(second)
    return result


# ask: Invert a dictionary | Swap the keys and values of a dictionary | Reverse a dictionary
def invert_dict(mapping: dict) -> dict:
    """Return the dictionary with keys and values swapped."""
    return {value: key for key, value in mapping.items()}


# ask: Sort a dictionary by value | Return a dictionary sorted by its values | Sort a dict by values
def sort_by_value(mapping: dict, reverse: bool = False) -> dict:
    """Return the dictionary sorted by its values."""
    return dict(sorted(mapping.items(), key=lambda item: item[1], reverse=reverse))


# ask: Sort a dictionary by key | Return a dictionary sorted by its keys
def sort_by_key(mapping: dict) -> dict:
    """Return the dictionary sorted by its keys."""
    return {key: mapping[key] for key in sorted(mapping)}


# ask: Group a list by a key function | Group items by a key | Group a list of items by the result of a function
def group_by(items: list, key: Callable) -> dict:
    """Return the items grouped by a key function."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# ask: Find the key with the largest value in a dictionary | Return the key of the maximum value of a dict
def key_of_max(mapping: dict) -> object:
    """Return the key with the largest value."""
    return max(mapping, key=mapping.get)


# ask: Flatten a nested dictionary | Flatten a dictionary with dotted keys
def flatten_dict(mapping: dict, prefix: str = "") -> dict:
    """Return a nested dictionary as a flat one with dotted keys."""
    result = {}
    for key, value in mapping.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            result.update(flatten_dict(value, name))
        else:
            result[name] = value
    return result


# ask: Filter a dictionary by value | Keep the entries of a dictionary that satisfy a condition
def filter_dict(mapping: dict, predicate: Callable) -> dict:
    """Return the entries of a dictionary whose values satisfy a predicate."""
    return {key: value for key, value in mapping.items() if predicate(value)}


# ask: Create a dictionary from two lists | Build a dictionary from a list of keys and a list of values
def to_dict(keys: list, values: list) -> dict:
    """Return a dictionary made of keys and values."""
    return dict(zip(keys, values))


# ask: Get a nested value of a dictionary by a path | Look up a dotted path in a nested dictionary
def get_path(mapping: dict, path: str, default: object = None) -> object:
    """Return the value at a dotted path of a nested dictionary."""
    current: object = mapping
    for key in path.split("."):
        if not isinstance(current, dict) or key not in current:
            return default
        current = current[key]
    return current


# ask: Read a file and return its contents | Read a text file | Return the contents of a file | Load a text file
def read_file(path: str) -> str:
    """Return the contents of a text file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


# ask: Write text to a file | Save a string to a file
def write_file(path: str, text: str) -> None:
    """Write text to a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# ask: Read the lines of a file | Return the lines of a text file as a list | Read a file line by line
def read_lines(path: str) -> list[str]:
    """Return the lines of a file without newlines."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


# ask: Count the lines of a file | Count the number of lines in a text file | Return the number of lines in a file
def count_lines(path: str) -> int:
    """Return the number of lines of a file."""
    with open(path, encoding="utf-8") as file:
        return sum(1 for _ in file)


# ask: Append a line to a file | Add a line at the end of a file
def append_line(path: str, line: str) -> None:
    """Append a line to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


# ask: Read a JSON file | Load JSON from a file | Parse a JSON file
def read_json(path: str) -> object:
    """Return the data of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


# ask: Write data to a JSON file | Save a dictionary as JSON | Store data as a JSON file
def write_json(path: str, data: object) -> None:
    """Write data to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)


# ask: Read a CSV file into a list of dictionaries | Load a CSV file | Parse a CSV file
def read_csv(path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ask: List all files in a directory | Return the files of a folder | Find all files in a directory recursively
def list_files(folder: str) -> list[str]:
    """Return the paths of all files under a folder."""
    paths = []
    for root, _, names in os.walk(folder):
        for name in names:
            paths.append(os.path.join(root, name))
    return paths


# ask: Find all files with a given extension | List the files of a folder that end with an extension
def files_with_extension(folder: str, extension: str) -> list[str]:
    """Return the files of a folder that have a given extension."""
    return [name for name in sorted(os.listdir(folder)) if name.endswith(extension)]


# ask: Get the extension of a file name | Return the file extension of a path
def file_extension(path: str) -> str:
    """Return the extension of a file name."""
    return os.path.splitext(path)[1]


# ask: Format a number of bytes | Format a file size for humans | Convert bytes to a human readable size
def format_size(size: float) -> str:
    """Return a number of bytes in readable form."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"


# ask: Format a duration in seconds as hours, minutes and seconds | Convert seconds to hours, minutes and seconds
def format_duration(seconds: int) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


# ask: Compute the number of days between two dates | Count the days between two dates
def days_between(first: date, second: date) -> int:
    """Return the number of days between two dates."""
    return abs((second - first).days)


# ask: Calculate the age from a birth date | Compute the age of a person | Return the age in years for a birthday
def age(birth: date, today: date) -> int:
    """Return the age in years of a person born on a date."""
    years = today.year - birth.year
    if (today.month, today.day) < (birth.month, birth.day):
        years -= 1
    return years


# ask: Return the day of the week of a date | Get the weekday name of a date
def weekday_name(day: date) -> str:
    """Return the name of the weekday of a date."""
    names = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    return names[day.weekday()]


# ask: Parse a date string | Convert a string such as 2024-01-31 to a date | Parse an ISO date
def parse_date(text: str) -> date:
    """Return the date that an ISO string stands for."""
    return datetime.strptime(text, "%Y-%m-%d").date()


# ask: Return the number of days in a month | Get how many days a month has
def days_in_month(year: int, month: int) -> int:
    """Return the number of days of a month."""
    if month == 2:
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return 29 if leap else 28
    return 30 if month in (4, 6, 9, 11) else 31


# ask: Cache the results of a function | Write a memoize decorator | Memoize a function | Implement memoization
def memoize(function: Callable) -> Callable:
    """Return a function that remembers its results."""
    cache: dict = {}

    @functools.wraps(function)
    def wrapper(*args):
        if args not in cache:
            cache[args] = function(*args)
        return cache[args]

    return wrapper


# ask: Measure the run time of a function | Write a decorator that times a function | Time a function call
def timed(function: Callable) -> Callable:
    """Return a function that prints how long it ran."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        print(f"{function.__name__} took {time.perf_counter() - start:.3f} s")
        return result

    return wrapper


# ask: Retry a function several times | Call a function again when it fails | Retry a function on errors
def retry(function: Callable, attempts: int = 3, delay: float = 0.1) -> object:
    """Return the result of a function, trying again when it raises."""
    for attempt in range(attempts):
        try:
            return function()
        except Exception:
            if attempt == attempts - 1:
                raise
            time.sleep(delay)
    return None


# ask: Compose two functions | Return the composition of two functions
def compose(f: Callable, g: Callable) -> Callable:
    """Return the composition of two functions."""
    return lambda x: f(g(x))


# ask: Print a greeting | Greet a person by name | Say hello to a user | Hello world
def greet(name: str = "world") -> str:
    """Return a greeting for a name."""
    return f"Hello, {name}!"
