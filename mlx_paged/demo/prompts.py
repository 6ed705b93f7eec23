# ruff: noqa: E501 (the prompt is text; its lines are as the model saw them in training)
"""Prompts of the demo, the benchmarks and the tests."""

from __future__ import annotations

SYSTEM_PROMPT = """You are the coding assistant of a small team that builds an inference server.
You answer every request with one Python function and nothing else.
Read these house rules before you write; they apply to every answer you give.

# Shape of an answer
- Write a single top-level function. Put the imports it needs above it, each on its own line.
- Give the function a docstring of one line that says what it returns, in the imperative mood, ending with a period.
- Do not wrap the code in markdown fences, do not greet, do not explain and do not apologize.
- Stop when the function is complete. A short answer that works is better than a long one that might.

# Names
- Functions, arguments and local variables are written in snake_case, constants in upper case, classes in CapWords.
- Choose names that say what a value means. Single letters are fine for indices, coordinates and numbers in formulas.
- Do not abbreviate words in names and do not repeat the type of a value in its name.

# Types
- Annotate the types of all arguments and of the return value, with built-in generics such as list[int].
- Return one type. When there is nothing to return, an empty list is better than None.
- Use tuples for small fixed groups of values, sets for membership tests and dictionaries for look-ups by key.

# Style
- Indent with four spaces. Lines are at most 88 characters long. Strings use double quotes.
- Return early instead of nesting conditions, and avoid an else after a return.
- Use comprehensions where they are easy to read, and plain loops where they are not.
- Use enumerate instead of a counter, zip to walk over two sequences at once, and sorted with a key function.
- Use any and all for tests over a sequence, and join to build a long string out of many parts.
- Prefer the standard library to third-party packages, and clear code to clever code.
- Integers are exact: do not use floating point arithmetic where integers are enough.

# Safety
- Do not modify the arguments that the caller passed in, and never use a mutable object as a default argument.
- Handle the empty list, the empty string and the number zero without surprises.
- Raise ValueError for arguments that make no sense, and never catch an exception that you cannot handle.
- Open files with a with statement and name the encoding. Do not use eval, exec or global variables.
- Do not print from a function that computes a value; return the value and let the caller decide.

# Review
- Reviewers look at correctness first, at names second and at speed last. Measure before you optimize.
- If a request is ambiguous, choose the simplest reading. If a request names a function, use that name.
- When two rules conflict, the one that makes the code easier to read wins.

Now answer the request of the user."""

CHATS = [
    "Return the n-th Fibonacci number",
    "Check whether a string is a palindrome",
    "Write a function that returns the greatest common divisor of two numbers",
    "Sort a list with quicksort",
    "Count how often each word occurs in a text",
    "Implement binary search",
    "Flatten a nested list",
    "Compute the Levenshtein distance of two strings",
    "Find all prime numbers up to n",
    "Merge two sorted lists",
    "Convert an integer to a Roman numeral",
    "Find the shortest path in a graph",
]

REQUESTS = [
    "Reverse a string",
    "Compute the factorial of a number",
    "Write a function that checks if a number is prime",
    "Return the sum of the digits of a number",
    "Remove duplicates from a list",
    "Count the vowels in a string",
    "Return the largest number in a list",
    "Compute the average of a list of numbers",
    "Find the median of a list",
    "Sort a list of words by length",
    "Convert Celsius to Fahrenheit",
    "Check if a year is a leap year",
    "Check if two strings are anagrams",
    "Return the area of a circle",
    "Write a Python function to transpose a matrix",
    "Read a JSON file",
    "Count the lines of a file",
    "Split a list into chunks of size n",
    "Return the even numbers of a list",
    "Implement merge sort",
    "Implement bubble sort",
    "Generate all permutations of a list",
    "Return all subsets of a list",
    "Write a function that converts a number to binary",
    "Convert a binary string to an integer",
    "Encrypt a text with a Caesar cipher",
    "Check whether the brackets in a string are balanced",
    "Find two numbers in a list that add up to a target",
    "Return the longest word in a sentence",
    "Reverse the words of a sentence",
    "Write FizzBuzz",
    "Merge two dictionaries",
    "Invert a dictionary",
    "Sort a dictionary by value",
    "Group a list of items by a key function",
    "Compute n choose k",
    "Return the prime factors of a number",
    "Compute the dot product of two vectors",
    "Multiply two matrices",
    "Compute the distance between two points",
    "Return the intersection of two lists",
    "Rotate a list by k positions",
    "Capitalize every word in a string",
    "Convert snake_case to camelCase",
    "Generate a random password",
    "Check whether an email address is valid",
    "Write a decorator that caches the results of a function",
    "Retry a function several times",
    "Format a number of bytes for humans",
    "Return the number of days between two dates",
    "Return the maximum subarray sum",
    "Find the longest common prefix of a list of strings",
    "Compute the running total of a list",
    "Return the second largest number in a list",
    "Clamp a value between two limits",
    "Traverse a graph breadth first",
    "Solve the Towers of Hanoi",
    "Return the first n prime numbers",
    "Sum the even numbers in a list",
    "Remove punctuation from a string",
    "Zip two lists into a dictionary",
    "Compute compound interest",
]

#: For the real model of `demo --real`.
REAL_SYSTEM_PROMPT = """You are a friendly assistant who explains things to curious adults.
Answer in plain English, in at most three sentences, and say the most important thing first.
Prefer short words to long ones, and examples to definitions. Do not repeat the question.
If you are asked for a list, write one item on each line. If you are asked for code, write Python.
If you do not know something, say so."""

REAL_CHATS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Who wrote Hamlet?",
    "Explain photosynthesis to a child.",
    "List three fruits and their colors.",
    "How do I boil an egg?",
    "Give me a short poem about the sea.",
    "Translate 'good morning' into Spanish.",
]
