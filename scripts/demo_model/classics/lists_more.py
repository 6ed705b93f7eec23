# mypy: ignore-errors
# ruff: noqa: E501, RUF005, RUF007 (asks are one line each; answers are plain on purpose)
"""More requests about lists, pairs and small sequence puzzles."""

import random
from collections.abc import Callable


# ask: Compute the moving average of a list | Calculate a moving average with a window | Smooth a list of numbers
def moving_average(numbers: list[float], window: int) -> list[float]:
    """Return the moving average of a list of numbers."""
    result = []
    for i in range(len(numbers) - window + 1):
        result.append(sum(numbers[i : i + window]) / window)
    return result


# ask: Filter the even numbers of a list | Return the even numbers in a list | Keep only even numbers | Get all even numbers
def even_numbers(numbers: list[int]) -> list[int]:
    """Return the even numbers of a list."""
    return [n for n in numbers if n % 2 == 0]


# ask: Filter the odd numbers of a list | Return the odd numbers in a list | Keep only odd numbers | Get all odd numbers
def odd_numbers(numbers: list[int]) -> list[int]:
    """Return the odd numbers of a list."""
    return [n for n in numbers if n % 2 != 0]


# ask: Sum the even numbers in a list | Add up the even numbers of a list | Return the sum of even numbers
def sum_even(numbers: list[int]) -> int:
    """Return the sum of the even numbers in a list."""
    return sum(n for n in numbers if n % 2 == 0)


# ask: Square every number in a list | Return the squares of a list of numbers | Compute the square of each element
def squares(numbers: list[float]) -> list[float]:
    """Return the squares of a list of numbers."""
    return [n * n for n in numbers]


# ask: Move all zeros to the end of a list | Move the zeros of a list to the end
def move_zeros(numbers: list[int]) -> list[int]:
    """Return the list with all zeros moved to the end."""
    nonzero = [n for n in numbers if n != 0]
    return nonzero + [0] * (len(numbers) - len(nonzero))


# ask: Find two numbers in a list that add up to a target | Solve the two sum problem | Two sum
# ask: Return the indices of two numbers that add up to a target | Find a pair with a given sum
def two_sum(numbers: list[int], target: int) -> tuple[int, int] | None:
    """Return the indices of two numbers that add up to the target."""
    seen: dict[int, int] = {}
    for i, number in enumerate(numbers):
        if target - number in seen:
            return seen[target - number], i
        seen[number] = i
    return None


# ask: Find all pairs with a given sum | Return all pairs in a list that add up to a target
def pairs_with_sum(numbers: list[int], target: int) -> list[tuple[int, int]]:
    """Return all pairs of numbers that add up to the target."""
    seen = set()
    pairs = []
    for number in numbers:
        if target - number in seen:
            pairs.append((target - number, number))
        seen.add(number)
    return pairs


# ask: Find the missing number from 1 to n | Find the missing number in a list of 1 to n
def missing_number(numbers: list[int]) -> int:
    """Return the number missing from a list of 1 to n."""
    n = len(numbers) + 1
    return n * (n + 1) // 2 - sum(numbers)


# ask: Find the number that occurs once while others occur twice | Find the single number in a list of pairs
def single_number(numbers: list[int]) -> int:
    """Return the number that occurs once while all others occur twice."""
    result = 0
    for number in numbers:
        result ^= number
    return result


# ask: Find the majority element of a list | Return the element that occurs more than half of the time
def majority_element(items: list) -> object:
    """Return the majority element of a list."""
    candidate = None
    count = 0
    for item in items:
        if count == 0:
            candidate = item
        count += 1 if item == candidate else -1
    return candidate


# ask: Find the maximum subarray sum | Implement Kadane's algorithm | Compute the largest sum of a contiguous subarray
def max_subarray(numbers: list[int]) -> int:
    """Return the largest sum of a contiguous subarray."""
    best = current = numbers[0]
    for number in numbers[1:]:
        current = max(number, current + number)
        best = max(best, current)
    return best


# ask: Find the best time to buy and sell stock | Compute the maximum profit of one buy and one sell
def max_profit(prices: list[int]) -> int:
    """Return the largest profit of buying once and selling later."""
    lowest = prices[0]
    profit = 0
    for price in prices:
        lowest = min(lowest, price)
        profit = max(profit, price - lowest)
    return profit


# ask: Generate all permutations of a list | Return all permutations of a list | List every ordering of a list
def permutations(items: list) -> list[list]:
    """Return all permutations of a list."""
    if not items:
        return [[]]
    result = []
    for i, item in enumerate(items):
        for rest in permutations(items[:i] + items[i + 1 :]):
            result.append([item] + rest)
    return result


# ask: Generate all combinations of k elements | Return all combinations of length k from a list
def combinations(items: list, k: int) -> list[list]:
    """Return all combinations of k elements of a list."""
    if k == 0:
        return [[]]
    result = []
    for i, item in enumerate(items):
        for rest in combinations(items[i + 1 :], k - 1):
            result.append([item] + rest)
    return result


# ask: Generate all subsets of a list | Return the power set of a list | Compute the power set | List all subsets
def subsets(items: list) -> list[list]:
    """Return all subsets of a list."""
    result: list[list] = [[]]
    for item in items:
        result += [subset + [item] for subset in result]
    return result


# ask: Compute the dot product of two lists | Return the dot product of two vectors | Calculate a dot product
def dot_product(a: list[float], b: list[float]) -> float:
    """Return the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b))


# ask: Normalize a list of numbers to the range 0 to 1 | Scale a list of numbers between 0 and 1
def normalize(numbers: list[float]) -> list[float]:
    """Return the numbers scaled to the range from 0 to 1."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return [0.0] * len(numbers)
    return [(n - low) / (high - low) for n in numbers]


# ask: Find the first item that satisfies a condition | Return the first element that matches a predicate
def find_first(items: list, predicate: Callable) -> object:
    """Return the first item that satisfies a predicate, or None."""
    for item in items:
        if predicate(item):
            return item
    return None


# ask: Partition a list by a predicate | Split a list into items that do and do not satisfy a condition
def partition(items: list, predicate: Callable) -> tuple[list, list]:
    """Return the items that satisfy a predicate and those that do not."""
    accepted, rejected = [], []
    for item in items:
        (accepted if predicate(item) else rejected).append(item)
    return accepted, rejected


# ask: Zip two lists into a list of pairs | Pair up the elements of two lists
def pair_up(a: list, b: list) -> list[tuple]:
    """Return the pairs of elements of two lists."""
    return [(x, y) for x, y in zip(a, b)]


# ask: Return every n-th element of a list | Get every other element of a list
def every_nth(items: list, n: int = 2) -> list:
    """Return every n-th element of a list."""
    return items[::n]


# ask: Return the last n elements of a list | Get the tail of a list
def last(items: list, n: int = 1) -> list:
    """Return the last n elements of a list."""
    return items[-n:] if n > 0 else []


# ask: Remove all occurrences of a value from a list | Delete a value from a list
def remove_value(items: list, value: object) -> list:
    """Return the list without a given value."""
    return [item for item in items if item != value]


# ask: Remove None values from a list | Drop the empty values of a list | Filter out None from a list
def remove_none(items: list) -> list:
    """Return the list without None values."""
    return [item for item in items if item is not None]


# ask: Pick a random element from a list | Choose a random item of a list
def random_choice(items: list) -> object:
    """Return a random element of a list."""
    return items[random.randrange(len(items))]


# ask: Sample k random elements from a list | Choose k random items without replacement
def random_sample(items: list, k: int) -> list:
    """Return k random elements of a list."""
    return random.sample(items, k)


# ask: Choose a random item with weights | Pick a random element according to weights
def weighted_choice(items: list, weights: list[float]) -> object:
    """Return a random item chosen according to weights."""
    threshold = random.random() * sum(weights)
    for item, weight in zip(items, weights):
        threshold -= weight
        if threshold <= 0:
            return item
    return items[-1]


# ask: Compute the sliding windows of a list | Return all windows of size n over a list
def windows(items: list, size: int) -> list[list]:
    """Return all windows of the given size over a list."""
    return [items[i : i + size] for i in range(len(items) - size + 1)]


# ask: Compute the differences between consecutive numbers | Return the differences of neighbours in a list
def differences(numbers: list[float]) -> list[float]:
    """Return the differences between consecutive numbers."""
    return [b - a for a, b in zip(numbers, numbers[1:])]


# ask: Swap two elements of a list | Exchange the items at two positions of a list
def swap_elements(items: list, i: int, j: int) -> list:
    """Return the list with two elements swapped."""
    result = list(items)
    result[i], result[j] = result[j], result[i]
    return result


# ask: Check if all elements of a list are equal | Test whether all items of a list are the same
def all_equal(items: list) -> bool:
    """Return True if all elements of a list are equal."""
    return all(item == items[0] for item in items)


# ask: Find the longest run of equal elements | Return the length of the longest run of equal items
def longest_run(items: list) -> int:
    """Return the length of the longest run of equal elements."""
    best = current = 0
    previous = object()
    for item in items:
        current = current + 1 if item == previous else 1
        previous = item
        best = max(best, current)
    return best
