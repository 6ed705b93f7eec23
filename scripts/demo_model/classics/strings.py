# mypy: ignore-errors
# ruff: noqa: E501 (asks are one line each; answers are plain on purpose)
"""Common requests about strings."""

from collections import Counter


# ask: Reverse a string | Return the reverse of a string | Return a string backwards | Reverse the characters of text
# ask: Reverse the given string | String reversal
def reverse_string(text: str) -> str:
    """Return the string reversed."""
    return text[::-1]


# ask: Check if a string is a palindrome | Test whether a word is a palindrome | Determine if text is a palindrome
# ask: Is palindrome | Tell whether a string reads the same backwards | Check for palindromes
def is_palindrome(text: str) -> bool:
    """Return True if the string is a palindrome."""
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]


# ask: Check if two strings are anagrams | Test whether two words are anagrams | Determine if two words are anagrams
def are_anagrams(first: str, second: str) -> bool:
    """Return True if two strings are anagrams of each other."""
    return sorted(first.lower()) == sorted(second.lower())


# ask: Group a list of words into anagrams | Group anagrams together | Group words that are anagrams
def group_anagrams(words: list[str]) -> list[list[str]]:
    """Return the words grouped into lists of anagrams."""
    groups: dict[str, list[str]] = {}
    for word in words:
        key = "".join(sorted(word))
        groups.setdefault(key, []).append(word)
    return list(groups.values())


# ask: Count the vowels in a string | Return the number of vowels in a text | Count vowels | Count how many vowels a word has
def count_vowels(text: str) -> int:
    """Return the number of vowels in a string."""
    return sum(1 for c in text.lower() if c in "aeiou")


# ask: Count the consonants in a string | Return the number of consonants in a text
def count_consonants(text: str) -> int:
    """Return the number of consonants in a string."""
    return sum(1 for c in text.lower() if c.isalpha() and c not in "aeiou")


# ask: Remove the vowels from a string | Strip all vowels from text | Delete vowels
def remove_vowels(text: str) -> str:
    """Return the string without its vowels."""
    return "".join(c for c in text if c.lower() not in "aeiou")


# ask: Count the words in a string | Count the words of a text | Return the number of words in a sentence | Count words
def count_words(text: str) -> int:
    """Return the number of words in a text."""
    return len(text.split())


# ask: Count the frequency of each word | Count how often each word occurs in a text | Build a word frequency table
# ask: Return a dictionary of word counts | Compute word frequencies | Count word occurrences in a string
def word_frequencies(text: str) -> dict[str, int]:
    """Return how often each word occurs in a text."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


# ask: Count the characters of a string | Count how often each character occurs | Compute letter frequencies
# ask: Return a dictionary of character counts | Count the occurrences of each letter in a string
def count_characters(text: str) -> dict[str, int]:
    """Return how often each character occurs in a string."""
    counts: dict[str, int] = {}
    for char in text:
        counts[char] = counts.get(char, 0) + 1
    return counts


# ask: Find the most common word in a text | Return the most frequent word
def most_common_word(text: str) -> str:
    """Return the most common word of a text."""
    return Counter(text.lower().split()).most_common(1)[0][0]


# ask: Find the most common character of a string | Return the most frequent letter in a string
def most_common_character(text: str) -> str:
    """Return the most common character of a string."""
    return max(set(text), key=text.count)


# ask: Find the first character that does not repeat | Return the first non-repeating character | First unique character
def first_unique_character(text: str) -> str | None:
    """Return the first character that occurs only once."""
    counts = Counter(text)
    for char in text:
        if counts[char] == 1:
            return char
    return None


# ask: Find the longest word in a sentence | Return the longest word of a text | Get the longest word in a string
def longest_word(text: str) -> str:
    """Return the longest word of a text."""
    return max(text.split(), key=len)


# ask: Find the shortest word in a sentence | Return the shortest word of a text
def shortest_word(text: str) -> str:
    """Return the shortest word of a text."""
    return min(text.split(), key=len)


# ask: Reverse the words in a sentence | Reverse the order of words in a string | Return a sentence with reversed words
def reverse_words(text: str) -> str:
    """Return the words of a text in reverse order."""
    return " ".join(reversed(text.split()))


# ask: Capitalize the first letter of each word | Capitalize every word in a sentence | Convert a string to title case
def capitalize_words(text: str) -> str:
    """Return the text with the first letter of each word capitalized."""
    return " ".join(word.capitalize() for word in text.split())


# ask: Swap the case of each letter | Swap upper and lower case in a string | Invert the case of a string
def swap_case(text: str) -> str:
    """Return the string with upper and lower case swapped."""
    return "".join(c.lower() if c.isupper() else c.upper() for c in text)


# ask: Convert snake_case to camelCase | Convert a snake case name to camel case | Turn snake_case into camelCase
def snake_to_camel(name: str) -> str:
    """Return a snake_case name in camelCase."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# ask: Convert camelCase to snake_case | Convert a camel case name to snake case | Turn CamelCase into snake_case
def camel_to_snake(name: str) -> str:
    """Return a camelCase name in snake_case."""
    result = ""
    for i, char in enumerate(name):
        if char.isupper() and i > 0:
            result += "_"
        result += char.lower()
    return result


# ask: Convert a string to a URL slug | Slugify a title | Make a slug from a string
def slugify(text: str) -> str:
    """Return the text as a URL slug."""
    cleaned = "".join(c if c.isalnum() else " " for c in text.lower())
    return "-".join(cleaned.split())


# ask: Remove duplicate characters from a string | Drop repeated letters from a string
def remove_duplicate_characters(text: str) -> str:
    """Return the string without repeated characters."""
    return "".join(dict.fromkeys(text))


# ask: Remove all whitespace from a string | Strip spaces from a string | Delete the spaces of a text
def remove_whitespace(text: str) -> str:
    """Return the string without any whitespace."""
    return "".join(text.split())


# ask: Collapse multiple spaces into one | Normalize whitespace in a string | Replace repeated spaces by a single space
def normalize_whitespace(text: str) -> str:
    """Return the text with runs of whitespace replaced by single spaces."""
    return " ".join(text.split())


# ask: Remove punctuation from a string | Strip punctuation from text | Delete all punctuation marks
def remove_punctuation(text: str) -> str:
    """Return the text without punctuation."""
    return "".join(c for c in text if c.isalnum() or c.isspace())


# ask: Encrypt text with a Caesar cipher | Implement the Caesar cipher | Shift each letter by a fixed number
# ask: Encode a message with a Caesar cipher | Caesar cipher
def caesar_cipher(text: str, shift: int) -> str:
    """Return the text encrypted with a Caesar cipher."""
    result = ""
    for char in text:
        if char.isalpha():
            base = ord("A") if char.isupper() else ord("a")
            result += chr((ord(char) - base + shift) % 26 + base)
        else:
            result += char
    return result


# ask: Run-length encode a string | Compress a string with run-length encoding | Implement run-length encoding
def run_length_encode(text: str) -> list[tuple[str, int]]:
    """Return the run-length encoding of a string."""
    runs: list[tuple[str, int]] = []
    for char in text:
        if runs and runs[-1][0] == char:
            runs[-1] = (char, runs[-1][1] + 1)
        else:
            runs.append((char, 1))
    return runs


# ask: Decode a run-length encoded string | Expand a run-length encoding
def run_length_decode(runs: list[tuple[str, int]]) -> str:
    """Return the string that a run-length encoding stands for."""
    return "".join(char * count for char, count in runs)


# ask: Count the occurrences of a substring | Count how often a substring occurs in a string
def count_substring(text: str, part: str) -> int:
    """Return how often a substring occurs in a text."""
    count = 0
    for i in range(len(text) - len(part) + 1):
        if text[i : i + len(part)] == part:
            count += 1
    return count


# ask: Find all positions of a substring | Return the indices at which a substring occurs
def find_all(text: str, part: str) -> list[int]:
    """Return all positions of a substring in a text."""
    positions = []
    start = text.find(part)
    while start != -1:
        positions.append(start)
        start = text.find(part, start + 1)
    return positions
