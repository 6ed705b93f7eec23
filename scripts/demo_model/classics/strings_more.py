# mypy: ignore-errors
# ruff: noqa: E501, SIM102 (asks are one line each; answers are plain on purpose)
"""More requests about strings: checks, distances, parsing and generation."""

import random
import re
import string


# ask: Check if a string contains only digits | Test whether a string is numeric | Determine if a string is all digits
def is_digits(text: str) -> bool:
    """Return True if the string contains only digits."""
    return bool(text) and all("0" <= c <= "9" for c in text)


# ask: Check if a string is a number | Test whether a string can be converted to a float
def is_number(text: str) -> bool:
    """Return True if the string can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


# ask: Check if all characters of a string are unique | Test whether a string has no repeated characters
def has_unique_characters(text: str) -> bool:
    """Return True if no character of the string repeats."""
    return len(set(text)) == len(text)


# ask: Check if a sentence is a pangram | Test whether a text contains every letter of the alphabet | Is pangram
def is_pangram(text: str) -> bool:
    """Return True if the text contains every letter of the alphabet."""
    return set("abcdefghijklmnopqrstuvwxyz") <= set(text.lower())


# ask: Check if parentheses are balanced | Check whether brackets are balanced | Validate matching brackets in a string
# ask: Test whether a string has balanced parentheses | Balanced brackets
def is_balanced(text: str) -> bool:
    """Return True if the brackets of the string are balanced."""
    pairs = {")": "(", "]": "[", "}": "{"}
    stack: list[str] = []
    for char in text:
        if char in "([{":
            stack.append(char)
        elif char in pairs:
            if not stack or stack.pop() != pairs[char]:
                return False
    return not stack


# ask: Check if an email address is valid | Validate an email address | Test whether a string is an email
def is_valid_email(address: str) -> bool:
    """Return True if the string looks like an email address."""
    pattern = r"[\w.+-]+@[\w-]+(\.[\w-]+)+"
    return re.fullmatch(pattern, address) is not None


# ask: Check if an IPv4 address is valid | Validate an IP address | Test whether a string is an IPv4 address
def is_valid_ipv4(address: str) -> bool:
    """Return True if the string is a valid IPv4 address."""
    parts = address.split(".")
    if len(parts) != 4:
        return False
    return all(part.isdigit() and 0 <= int(part) <= 255 for part in parts)


# ask: Check if a password is strong | Validate the strength of a password | Test whether a password is strong enough
def is_strong_password(password: str) -> bool:
    """Return True if the password is long and mixes kinds of characters."""
    return (
        len(password) >= 8
        and any(c.islower() for c in password)
        and any(c.isupper() for c in password)
        and any(c.isdigit() for c in password)
    )


# ask: Generate a random password | Create a random password of a given length | Make a random password
def random_password(length: int = 12) -> str:
    """Return a random password of the given length."""
    alphabet = string.ascii_letters + string.digits
    return "".join(random.choice(alphabet) for _ in range(length))


# ask: Generate a random string | Create a random string of n letters | Return a random string of a given length
def random_string(length: int) -> str:
    """Return a random string of lowercase letters."""
    return "".join(random.choice(string.ascii_lowercase) for _ in range(length))


# ask: Compute the Levenshtein distance of two strings | Compute the edit distance between two words
# ask: Calculate the Levenshtein distance between two strings | Edit distance
def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance of two strings."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            cost = 0 if x == y else 1
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + cost))
        previous = current
    return previous[-1]


# ask: Compute the Hamming distance of two strings | Count the positions at which two strings differ
def hamming_distance(a: str, b: str) -> int:
    """Return the number of positions at which two strings differ."""
    if len(a) != len(b):
        raise ValueError("the strings must have the same length")
    return sum(x != y for x, y in zip(a, b))


# ask: Find the longest common prefix of a list of strings | Return the common prefix of several words
def common_prefix(words: list[str]) -> str:
    """Return the longest common prefix of a list of strings."""
    if not words:
        return ""
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


# ask: Find the longest common substring of two strings | Return the longest substring that two strings share
def longest_common_substring(a: str, b: str) -> str:
    """Return the longest common substring of two strings."""
    best = ""
    for i in range(len(a)):
        for j in range(i + len(best) + 1, len(a) + 1):
            if a[i:j] in b:
                best = a[i:j]
    return best


# ask: Find the longest palindromic substring | Return the longest palindrome inside a string
def longest_palindrome(text: str) -> str:
    """Return the longest palindromic substring of a string."""
    best = ""
    for i in range(len(text)):
        for left, right in ((i, i), (i, i + 1)):
            while left >= 0 and right < len(text) and text[left] == text[right]:
                left -= 1
                right += 1
            if right - left - 1 > len(best):
                best = text[left + 1 : right]
    return best


# ask: Find the longest substring without repeating characters | Compute the length of the longest unique substring
def longest_unique_substring(text: str) -> int:
    """Return the length of the longest substring without repeated characters."""
    seen: dict[str, int] = {}
    start = best = 0
    for i, char in enumerate(text):
        if char in seen and seen[char] >= start:
            start = seen[char] + 1
        seen[char] = i
        best = max(best, i - start + 1)
    return best


# ask: Generate all substrings of a string | List every substring of a string
def substrings(text: str) -> list[str]:
    """Return all substrings of a string."""
    return [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]


# ask: Truncate a string to a maximum length | Shorten a string with an ellipsis | Cut a text to n characters
def truncate(text: str, length: int) -> str:
    """Return the text cut to a maximum length, with an ellipsis."""
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


# ask: Wrap text to a given width | Break a text into lines of at most n characters | Wrap a string into lines
def wrap_text(text: str, width: int) -> list[str]:
    """Return the text broken into lines of at most the given width."""
    lines = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    if line:
        lines.append(line)
    return lines


# ask: Extract all numbers from a string | Find the numbers in a text | Get all integers from a string
def extract_numbers(text: str) -> list[int]:
    """Return all integers found in a text."""
    return [int(match) for match in re.findall(r"-?\d+", text)]


# ask: Extract email addresses from a text | Find all email addresses in a string
def extract_emails(text: str) -> list[str]:
    """Return all email addresses found in a text."""
    return re.findall(r"[\w.+-]+@[\w-]+\.[\w.-]+", text)


# ask: Extract the hashtags from a text | Find all hashtags in a string
def extract_hashtags(text: str) -> list[str]:
    """Return all hashtags found in a text."""
    return re.findall(r"#(\w+)", text)


# ask: Parse a query string | Parse a URL query string into a dictionary | Split a query string into key-value pairs
def parse_query(query: str) -> dict[str, str]:
    """Return the keys and values of a query string."""
    result = {}
    for part in query.lstrip("?").split("&"):
        if part:
            key, _, value = part.partition("=")
            result[key] = value
    return result


# ask: Split a string into chunks of n characters | Break a string into pieces of equal length
def split_chunks(text: str, size: int) -> list[str]:
    """Return the string split into pieces of the given size."""
    return [text[i : i + size] for i in range(0, len(text), size)]


# ask: Check if a string starts with a capital letter | Test whether a word is capitalized
def starts_with_capital(text: str) -> bool:
    """Return True if the string starts with a capital letter."""
    return text[:1].isupper()


# ask: Check if one string is a rotation of another | Test whether two strings are rotations of each other
def is_rotation(first: str, second: str) -> bool:
    """Return True if one string is a rotation of the other."""
    return len(first) == len(second) and second in first + first


# ask: Mask all but the last four characters | Hide a credit card number | Mask a string except its last four characters
def mask(text: str, visible: int = 4) -> str:
    """Return the string with all but its last characters masked."""
    return "*" * max(len(text) - visible, 0) + text[-visible:]


# ask: Return the initials of a name | Get the initials of a full name
def initials(name: str) -> str:
    """Return the initials of a name."""
    return "".join(word[0].upper() for word in name.split())


# ask: Translate a word into Pig Latin | Convert a word to pig latin
def pig_latin(word: str) -> str:
    """Return the word in Pig Latin."""
    for i, char in enumerate(word):
        if char.lower() in "aeiou":
            return word[i:] + word[:i] + "ay"
    return word + "ay"


# ask: Repeat a string n times | Return a string repeated n times
def repeat(text: str, times: int) -> str:
    """Return the string repeated a number of times."""
    return text * times


# ask: Encode text in Morse code | Convert letters to Morse code | Translate a text into Morse code
def to_morse(text: str) -> str:
    """Return the text in Morse code."""
    codes = ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. "
    codes += "... - ..- ...- .-- -..- -.-- --.."
    table = dict(zip(string.ascii_lowercase, codes.split()))
    return " ".join(table[c] for c in text.lower() if c in table)
