# mypy: ignore-errors
# ruff: noqa: E501, RUF005 (asks are one line each; answers are plain on purpose)
"""Common requests about graphs, trees, matrices and geometry."""

import heapq
import math
from collections import deque


# ask: Traverse a graph breadth first | Implement breadth-first search | Breadth-first search | BFS
# ask: Do a breadth-first search of a graph
def breadth_first(graph: dict, start: object) -> list:
    """Return the nodes of a graph in breadth-first order."""
    visited = [start]
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for neighbour in graph[node]:
            if neighbour not in visited:
                visited.append(neighbour)
                queue.append(neighbour)
    return visited


# ask: Traverse a graph depth first | Implement depth-first search | Depth-first search | DFS
# ask: Do a depth-first search of a graph
def depth_first(graph: dict, start: object) -> list:
    """Return the nodes of a graph in depth-first order."""
    visited = []
    stack = [start]
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.append(node)
            stack.extend(reversed(graph[node]))
    return visited


# ask: Find the shortest path in a graph | Return the shortest path between two nodes | Shortest path
def shortest_path(graph: dict, start: object, goal: object) -> list | None:
    """Return the shortest path between two nodes of a graph."""
    queue = deque([[start]])
    seen = {start}
    while queue:
        path = queue.popleft()
        if path[-1] == goal:
            return path
        for neighbour in graph[path[-1]]:
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(path + [neighbour])
    return None


# ask: Implement Dijkstra's algorithm | Compute the shortest distances in a weighted graph | Dijkstra
def dijkstra(graph: dict, start: object) -> dict:
    """Return the shortest distance from a node to every other node."""
    distances = {start: 0}
    queue = [(0, start)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances[node]:
            continue
        for neighbour, weight in graph[node].items():
            candidate = distance + weight
            if candidate < distances.get(neighbour, math.inf):
                distances[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distances


# ask: Sort the nodes of a graph topologically | Implement a topological sort | Topological sort
def topological_sort(graph: dict) -> list:
    """Return the nodes of a directed graph in topological order."""
    result: list = []
    visited = set()

    def visit(node: object) -> None:
        if node not in visited:
            visited.add(node)
            for neighbour in graph.get(node, []):
                visit(neighbour)
            result.append(node)

    for node in graph:
        visit(node)
    return result[::-1]


# ask: Check if a graph has a cycle | Detect a cycle in a directed graph | Find out if a graph contains a cycle
def has_cycle(graph: dict) -> bool:
    """Return True if a directed graph contains a cycle."""
    done = set()
    active = set()

    def visit(node: object) -> bool:
        if node in active:
            return True
        if node in done:
            return False
        active.add(node)
        found = any(visit(neighbour) for neighbour in graph.get(node, []))
        active.remove(node)
        done.add(node)
        return found

    return any(visit(node) for node in graph)


# ask: Count the connected components of a graph | Find the number of connected components
def count_components(graph: dict) -> int:
    """Return the number of connected components of a graph."""
    seen = set()
    count = 0
    for start in graph:
        if start not in seen:
            count += 1
            stack = [start]
            while stack:
                node = stack.pop()
                if node not in seen:
                    seen.add(node)
                    stack.extend(graph[node])
    return count


# ask: Count the islands in a grid | Count the number of islands in a matrix
def count_islands(grid: list[list[int]]) -> int:
    """Return the number of islands of ones in a grid."""
    seen = set()

    def visit(r: int, c: int) -> None:
        if 0 <= r < len(grid) and 0 <= c < len(grid[0]) and grid[r][c] and (r, c) not in seen:
            seen.add((r, c))
            for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                visit(r + dr, c + dc)

    count = 0
    for r in range(len(grid)):
        for c in range(len(grid[0])):
            if grid[r][c] and (r, c) not in seen:
                count += 1
                visit(r, c)
    return count


# ask: Compute the depth of a binary tree | Find the height of a binary tree | Return the maximum depth of a tree
def tree_depth(node: object) -> int:
    """Return the depth of a binary tree."""
    if node is None:
        return 0
    return 1 + max(tree_depth(node.left), tree_depth(node.right))


# ask: Traverse a binary tree in order | Return the inorder traversal of a binary tree
def inorder(node: object) -> list:
    """Return the values of a binary tree in order."""
    if node is None:
        return []
    return inorder(node.left) + [node.value] + inorder(node.right)


# ask: Invert a binary tree | Mirror a binary tree | Swap the children of every node of a tree
def invert_tree(node: object) -> object:
    """Return the binary tree with left and right swapped."""
    if node is not None:
        node.left, node.right = invert_tree(node.right), invert_tree(node.left)
    return node


# ask: Reverse a linked list | Return a linked list in reverse order
def reverse_linked_list(head: object) -> object:
    """Return the head of a reversed linked list."""
    previous = None
    while head is not None:
        head.next, previous, head = previous, head, head.next
    return previous


# ask: Transpose a matrix | Return the transpose of a matrix | Swap the rows and columns of a matrix
def transpose(matrix: list[list]) -> list[list]:
    """Return the transpose of a matrix."""
    return [list(row) for row in zip(*matrix)]


# ask: Multiply two matrices | Compute the product of two matrices | Implement matrix multiplication
def matrix_multiply(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Return the product of two matrices."""
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


# ask: Add two matrices | Return the sum of two matrices
def matrix_add(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Return the sum of two matrices."""
    return [[x + y for x, y in zip(r, s)] for r, s in zip(a, b)]


# ask: Create an identity matrix | Return the identity matrix of size n | Build an identity matrix
def identity_matrix(n: int) -> list[list[int]]:
    """Return the identity matrix of size n."""
    return [[1 if i == j else 0 for j in range(n)] for i in range(n)]


# ask: Compute the determinant of a matrix | Return the determinant of a square matrix
def determinant(matrix: list[list[float]]) -> float:
    """Return the determinant of a square matrix."""
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0.0
    for j, value in enumerate(matrix[0]):
        minor = [row[:j] + row[j + 1 :] for row in matrix[1:]]
        total += (-1) ** j * value * determinant(minor)
    return total


# ask: Rotate a matrix by 90 degrees | Rotate a square matrix clockwise
def rotate_matrix(matrix: list[list]) -> list[list]:
    """Return the matrix rotated clockwise by 90 degrees."""
    return [list(row) for row in zip(*matrix[::-1])]


# ask: Traverse a matrix in spiral order | Return the elements of a matrix in spiral order | Spiral matrix
def spiral_order(matrix: list[list]) -> list:
    """Return the elements of a matrix in spiral order."""
    result = []
    rows = [list(row) for row in matrix]
    while rows:
        result.extend(rows.pop(0))
        rows = [list(row) for row in zip(*rows)][::-1]
    return result


# ask: Sum the diagonal of a matrix | Compute the trace of a matrix | Return the sum of the main diagonal
def trace(matrix: list[list[float]]) -> float:
    """Return the sum of the main diagonal of a matrix."""
    return sum(matrix[i][i] for i in range(len(matrix)))


# ask: Compute the distance between two points | Calculate the Euclidean distance between two points | Distance
def distance(x1: float, y1: float, x2: float, y2: float) -> float:
    """Return the distance between two points."""
    return math.sqrt((x2 - x1) ** 2 + (y2 - y1) ** 2)


# ask: Compute the Euclidean distance of two vectors | Calculate the distance between two vectors
def euclidean_distance(a: list[float], b: list[float]) -> float:
    """Return the Euclidean distance of two vectors."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


# ask: Compute the Manhattan distance of two points | Calculate the taxicab distance between two points
def manhattan_distance(a: list[float], b: list[float]) -> float:
    """Return the Manhattan distance of two points."""
    return sum(abs(x - y) for x, y in zip(a, b))


# ask: Compute the cosine similarity of two vectors | Calculate the cosine similarity between two lists
def cosine_similarity(a: list[float], b: list[float]) -> float:
    """Return the cosine similarity of two vectors."""
    dot = sum(x * y for x, y in zip(a, b))
    length_a = math.sqrt(sum(x * x for x in a))
    length_b = math.sqrt(sum(y * y for y in b))
    return dot / (length_a * length_b)
