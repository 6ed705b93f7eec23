# mypy: ignore-errors
# ruff: noqa: E501, RUF005 (asks are one line each; answers are plain on purpose)
"""Common requests for sorting, searching, recursion and dynamic programming."""

import heapq


# ask: Implement binary search | Find an item in a sorted list with binary search | Search a sorted list | Binary search
# ask: Perform a binary search on a sorted list | Return the index of a target in a sorted list
def binary_search(items: list, target: object) -> int:
    """Return the index of the target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


# ask: Implement linear search | Search a list from left to right | Linear search
def linear_search(items: list, target: object) -> int:
    """Return the index of the target in a list, or -1."""
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


# ask: Sort a list with bubble sort | Implement bubble sort | Bubble sort | Sort a list of numbers using bubble sort
def bubble_sort(items: list) -> list:
    """Sort a list with bubble sort."""
    result = list(items)
    for i in range(len(result)):
        for j in range(len(result) - 1 - i):
            if result[j] > result[j + 1]:
                result[j], result[j + 1] = result[j + 1], result[j]
    return result


# ask: Sort a list with insertion sort | Implement insertion sort | Insertion sort
def insertion_sort(items: list) -> list:
    """Sort a list with insertion sort."""
    result = list(items)
    for i in range(1, len(result)):
        value = result[i]
        j = i - 1
        while j >= 0 and result[j] > value:
            result[j + 1] = result[j]
            j -= 1
        result[j + 1] = value
    return result


# ask: Sort a list with selection sort | Implement selection sort | Selection sort
def selection_sort(items: list) -> list:
    """Sort a list with selection sort."""
    result = list(items)
    for i in range(len(result)):
        smallest = i
        for j in range(i + 1, len(result)):
            if result[j] < result[smallest]:
                smallest = j
        result[i], result[smallest] = result[smallest], result[i]
    return result


# ask: Sort a list with quicksort | Implement quicksort | Quick sort | Sort a list using the quicksort algorithm
def quicksort(items: list) -> list:
    """Sort a list with quicksort."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)


# ask: Sort a list with merge sort | Implement merge sort | Merge sort | Sort a list using merge sort
def merge_sort(items: list) -> list:
    """Sort a list with merge sort."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


# ask: Sort a list with heap sort | Implement heapsort | Heap sort
def heap_sort(items: list) -> list:
    """Sort a list with a heap."""
    heap = list(items)
    heapq.heapify(heap)
    return [heapq.heappop(heap) for _ in range(len(heap))]


# ask: Sort a list with counting sort | Implement counting sort | Counting sort
def counting_sort(numbers: list[int]) -> list[int]:
    """Sort a list of non-negative integers with counting sort."""
    if not numbers:
        return []
    counts = [0] * (max(numbers) + 1)
    for number in numbers:
        counts[number] += 1
    result = []
    for value, count in enumerate(counts):
        result.extend([value] * count)
    return result


# ask: Find the k-th smallest element of a list | Return the kth smallest number | Implement quickselect
def kth_smallest(items: list, k: int) -> object:
    """Return the k-th smallest element of a list."""
    return sorted(items)[k - 1]


# ask: Find the longest common subsequence of two strings | Compute the longest common subsequence
# ask: Compute the length of the longest common subsequence | Longest common subsequence
def longest_common_subsequence(a: str, b: str) -> int:
    """Return the length of the longest common subsequence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if x == y:
                table[i + 1][j + 1] = table[i][j] + 1
            else:
                table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


# ask: Find the longest increasing subsequence | Compute the length of the longest increasing subsequence
def longest_increasing_subsequence(numbers: list[int]) -> int:
    """Return the length of the longest increasing subsequence."""
    if not numbers:
        return 0
    lengths = [1] * len(numbers)
    for i in range(len(numbers)):
        for j in range(i):
            if numbers[j] < numbers[i]:
                lengths[i] = max(lengths[i], lengths[j] + 1)
    return max(lengths)


# ask: Solve the knapsack problem | Solve the 0/1 knapsack problem | Compute the best value of a knapsack
def knapsack(values: list[int], weights: list[int], capacity: int) -> int:
    """Return the largest value that fits in a knapsack."""
    best = [0] * (capacity + 1)
    for value, weight in zip(values, weights):
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]


# ask: Compute the minimum number of coins for an amount | Solve the coin change problem | Coin change
def coin_change(coins: list[int], amount: int) -> int:
    """Return the smallest number of coins that make an amount, or -1."""
    best = [0] + [amount + 1] * amount
    for value in range(1, amount + 1):
        for coin in coins:
            if coin <= value:
                best[value] = min(best[value], best[value - coin] + 1)
    return best[amount] if best[amount] <= amount else -1


# ask: Count the ways to make change | Count the number of ways to make an amount from coins
def count_change(coins: list[int], amount: int) -> int:
    """Return the number of ways to make an amount from coins."""
    ways = [1] + [0] * amount
    for coin in coins:
        for value in range(coin, amount + 1):
            ways[value] += ways[value - coin]
    return ways[amount]


# ask: Count the ways to climb n stairs | Solve the climbing stairs problem
def climb_stairs(n: int) -> int:
    """Return the number of ways to climb n stairs by steps of one or two."""
    a, b = 1, 1
    for _ in range(n):
        a, b = b, a + b
    return a


# ask: Solve the Towers of Hanoi | Solve the tower of Hanoi puzzle | List the moves of the Towers of Hanoi
def hanoi(n: int, source: str = "A", target: str = "C", spare: str = "B") -> list[tuple[str, str]]:
    """Return the moves that solve the Towers of Hanoi."""
    if n == 0:
        return []
    return (
        hanoi(n - 1, source, spare, target)
        + [(source, target)]
        + hanoi(n - 1, spare, target, source)
    )


# ask: Solve the n queens problem | Place n queens on a chessboard | Solve n-queens
def solve_queens(n: int, columns: tuple = ()) -> tuple | None:
    """Return the columns of n queens that do not attack each other."""
    row = len(columns)
    if row == n:
        return columns
    for column in range(n):
        if all(c != column and abs(c - column) != row - r for r, c in enumerate(columns)):
            solution = solve_queens(n, (*columns, column))
            if solution is not None:
                return solution
    return None


# ask: Generate all valid combinations of n pairs of parentheses | Generate balanced parentheses
def generate_parentheses(n: int) -> list[str]:
    """Return all balanced strings of n pairs of parentheses."""
    if n == 0:
        return [""]
    result = []
    for i in range(n):
        for inner in generate_parentheses(i):
            for rest in generate_parentheses(n - 1 - i):
                result.append(f"({inner}){rest}")
    return result


# ask: Merge overlapping intervals | Merge a list of intervals | Combine overlapping intervals
def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals with overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


# ask: Evaluate an expression in reverse Polish notation | Evaluate a postfix expression
def evaluate_postfix(expression: str) -> float:
    """Return the value of a postfix expression."""
    stack: list[float] = []
    for token in expression.split():
        if token in "+-*/":
            b, a = stack.pop(), stack.pop()
            if token == "+":
                stack.append(a + b)
            elif token == "-":
                stack.append(a - b)
            elif token == "*":
                stack.append(a * b)
            else:
                stack.append(a / b)
        else:
            stack.append(float(token))
    return stack.pop()
