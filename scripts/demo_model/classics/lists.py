# mypy: ignore-errors
# ruff: noqa: E501, RUF007 (asks are one line each; answers are plain on purpose)
"""Common requests about lists."""

import random
from itertools import groupby


# ask: Reverse a list | Return a list in reverse order | Reverse the order of a list
def reverse_list(items: list) -> list:
    """Return the list in reverse order."""
    return items[::-1]


# ask: Reverse a list in place | Reverse a list without making a copy
def reverse_in_place(items: list) -> None:
    """Reverse a list in place."""
    left, right = 0, len(items) - 1
    while left < right:
        items[left], items[right] = items[right], items[left]
        left += 1
        right -= 1


# ask: Flatten a nested list | Flatten a list of lists | Turn a nested list into a flat list | Flatten list
# ask: Flatten an arbitrarily nested list | Flatten a deeply nested list
def flatten(items: list) -> list:
    """Return a nested list as a flat list."""
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


# ask: Remove duplicates from a list | Remove duplicates from a list while keeping the order | Return the unique items
# ask: Deduplicate a list | Drop duplicate elements of a list | Get the unique elements of a list
def unique(items: list) -> list:
    """Return the list without duplicates, in order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


# ask: Find the duplicates in a list | Return the elements that occur more than once | Find repeated items in a list
def find_duplicates(items: list) -> list:
    """Return the elements that occur more than once in a list."""
    seen = set()
    duplicates = set()
    for item in items:
        if item in seen:
            duplicates.add(item)
        seen.add(item)
    return list(duplicates)


# ask: Check if a list has duplicates | Test whether a list contains duplicates
def has_duplicates(items: list) -> bool:
    """Return True if the list contains duplicates."""
    return len(set(items)) != len(items)


# ask: Split a list into chunks | Break a list into chunks of size n | Divide a list into pieces of equal size
# ask: Chunk a list | Split a list into batches of n items
def chunks(items: list, size: int) -> list[list]:
    """Return the list split into chunks of the given size."""
    return [items[i : i + size] for i in range(0, len(items), size)]


# ask: Split a list into two halves | Divide a list into two halves
def halves(items: list) -> tuple[list, list]:
    """Return the two halves of a list."""
    middle = len(items) // 2
    return items[:middle], items[middle:]


# ask: Sum the numbers in a list | Add up all numbers in a list | Compute the sum of a list
def sum_list(numbers: list[float]) -> float:
    """Return the sum of a list of numbers."""
    total = 0.0
    for number in numbers:
        total += number
    return total


# ask: Multiply all numbers in a list | Compute the product of a list | Return the product of all numbers in a list
def product(numbers: list[float]) -> float:
    """Return the product of a list of numbers."""
    result = 1.0
    for number in numbers:
        result *= number
    return result


# ask: Find the largest number in a list | Return the maximum of a list | Find the max value of a list
# ask: Get the biggest element of a list | Find the maximum in a list without max
def maximum(numbers: list[float]) -> float:
    """Return the largest number in a list."""
    largest = numbers[0]
    for number in numbers[1:]:
        if number > largest:
            largest = number
    return largest


# ask: Find the smallest number in a list | Return the minimum of a list | Find the min value of a list
def minimum(numbers: list[float]) -> float:
    """Return the smallest number in a list."""
    smallest = numbers[0]
    for number in numbers[1:]:
        if number < smallest:
            smallest = number
    return smallest


# ask: Find the second largest number in a list | Return the second highest value of a list | Get the second largest element
def second_largest(numbers: list[float]) -> float:
    """Return the second largest number in a list."""
    return sorted(set(numbers))[-2]


# ask: Find the index of the largest element | Return the position of the maximum in a list | Implement argmax
def argmax(numbers: list[float]) -> int:
    """Return the index of the largest number in a list."""
    return max(range(len(numbers)), key=lambda i: numbers[i])


# ask: Return the n largest numbers of a list | Get the top k elements of a list | Find the k largest elements
def top_k(numbers: list[float], k: int) -> list[float]:
    """Return the k largest numbers of a list."""
    return sorted(numbers, reverse=True)[:k]


# ask: Compute the average of a list of numbers | Compute the mean of a list | Calculate the average | Return the mean
# ask: Find the average of a list | Return the arithmetic mean of a list of numbers
def mean(numbers: list[float]) -> float:
    """Return the average of a list of numbers."""
    if not numbers:
        return 0.0
    return sum(numbers) / len(numbers)


# ask: Compute the median of a list of numbers | Find the median of a list | Calculate the median
def median(numbers: list[float]) -> float:
    """Return the median of a list of numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


# ask: Compute the mode of a list | Find the most common element of a list | Return the most frequent item in a list
def mode(items: list) -> object:
    """Return the most common element of a list."""
    return max(set(items), key=items.count)


# ask: Compute the variance of a list of numbers | Calculate the variance
def variance(numbers: list[float]) -> float:
    """Return the variance of a list of numbers."""
    average = sum(numbers) / len(numbers)
    return sum((x - average) ** 2 for x in numbers) / len(numbers)


# ask: Compute the standard deviation of a list of numbers | Calculate the standard deviation
def standard_deviation(numbers: list[float]) -> float:
    """Return the standard deviation of a list of numbers."""
    average = sum(numbers) / len(numbers)
    variance = sum((x - average) ** 2 for x in numbers) / len(numbers)
    return variance**0.5


# ask: Count how often an item occurs in a list | Count the occurrences of a value in a list
def count_occurrences(items: list, value: object) -> int:
    """Return how often a value occurs in a list."""
    count = 0
    for item in items:
        if item == value:
            count += 1
    return count


# ask: Count the elements of a list | Count how often each element occurs in a list | Build a frequency table of a list
def frequencies(items: list) -> dict:
    """Return how often each element occurs in a list."""
    counts: dict = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


# ask: Rotate a list by k positions | Rotate a list to the right | Shift the elements of a list by k
def rotate(items: list, k: int) -> list:
    """Return the list rotated to the right by k positions."""
    if not items:
        return []
    k %= len(items)
    return items[-k:] + items[:-k]


# ask: Merge two sorted lists | Merge two sorted lists into one | Combine two sorted lists into a sorted list
def merge_sorted(a: list, b: list) -> list:
    """Return the merge of two sorted lists."""
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i])
            i += 1
        else:
            result.append(b[j])
            j += 1
    return result + a[i:] + b[j:]


# ask: Interleave two lists | Alternate the elements of two lists | Merge two lists by alternating elements
def interleave(a: list, b: list) -> list:
    """Return the elements of two lists in alternation."""
    result = []
    for x, y in zip(a, b):
        result.extend([x, y])
    return result


# ask: Find the common elements of two lists | Return the intersection of two lists | Find the elements two lists share
def intersection(a: list, b: list) -> list:
    """Return the elements that two lists have in common."""
    members = set(b)
    return [item for item in a if item in members]


# ask: Return the union of two lists | Combine two lists without duplicates
def union(a: list, b: list) -> list:
    """Return the union of two lists without duplicates."""
    return list(dict.fromkeys(a + b))


# ask: Find the elements of one list that are not in another | Return the difference of two lists
def difference(a: list, b: list) -> list:
    """Return the elements of the first list that are not in the second."""
    members = set(b)
    return [item for item in a if item not in members]


# ask: Check if a list is sorted | Test whether a list is sorted in ascending order | Determine if a list is sorted
def is_sorted(items: list) -> bool:
    """Return True if the list is sorted in ascending order."""
    return all(a <= b for a, b in zip(items, items[1:]))


# ask: Shuffle a list | Shuffle a list randomly | Return a random permutation of a list | Implement Fisher-Yates shuffle
def shuffle(items: list) -> list:
    """Return a shuffled copy of a list."""
    result = list(items)
    for i in range(len(result) - 1, 0, -1):
        j = random.randint(0, i)
        result[i], result[j] = result[j], result[i]
    return result


# ask: Group consecutive equal elements of a list | Group equal neighbours of a list
def group_consecutive(items: list) -> list[list]:
    """Return the list with equal neighbours grouped."""
    return [list(group) for _, group in groupby(items)]


# ask: Compute the running total of a list | Return the cumulative sum of a list | Compute prefix sums
def cumulative_sum(numbers: list[float]) -> list[float]:
    """Return the running totals of a list of numbers."""
    total = 0.0
    result = []
    for number in numbers:
        total += number
        result.append(total)
    return result
