# mypy: ignore-errors
# ruff: noqa: E501 (asks are one line each; answers are plain on purpose)
"""Common requests for small classes."""

from collections import OrderedDict


# ask: Write a stack class | Implement a stack | Create a Stack class with push and pop | Stack class
class Stack:
    """A last-in, first-out stack."""

    def __init__(self) -> None:
        self.items: list = []

    def push(self, item: object) -> None:
        """Put an item on the stack."""
        self.items.append(item)

    def pop(self) -> object:
        """Take the last item off the stack."""
        return self.items.pop()

    def is_empty(self) -> bool:
        """Return True if the stack is empty."""
        return not self.items


# ask: Write a queue class | Implement a queue | Create a Queue class with enqueue and dequeue | Queue class
class Queue:
    """A first-in, first-out queue."""

    def __init__(self) -> None:
        self.items: list = []

    def enqueue(self, item: object) -> None:
        """Put an item at the end of the queue."""
        self.items.append(item)

    def dequeue(self) -> object:
        """Take the first item off the queue."""
        return self.items.pop(0)

    def is_empty(self) -> bool:
        """Return True if the queue is empty."""
        return not self.items


# ask: Write a linked list class | Implement a linked list | Create a LinkedList class | Linked list class
class LinkedList:
    """A singly linked list."""

    def __init__(self) -> None:
        self.head: tuple | None = None

    def add(self, value: object) -> None:
        """Put a value at the front of the list."""
        self.head = (value, self.head)

    def __iter__(self):
        node = self.head
        while node is not None:
            value, node = node
            yield value


# ask: Write a class for a point | Implement a Point class | Create a Point class with x and y | Point class
class Point:
    """A point with two coordinates."""

    def __init__(self, x: float, y: float) -> None:
        self.x = x
        self.y = y

    def distance(self, other: "Point") -> float:
        """Return the distance to another point."""
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5


# ask: Write a bank account class | Implement a BankAccount class | Create a class for a bank account
class BankAccount:
    """A bank account with a balance."""

    def __init__(self, owner: str, balance: float = 0.0) -> None:
        self.owner = owner
        self.balance = balance

    def deposit(self, amount: float) -> None:
        """Add an amount to the balance."""
        self.balance += amount

    def withdraw(self, amount: float) -> None:
        """Take an amount from the balance."""
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount


# ask: Write a counter class | Implement a counter class | Create a Counter class with increment and reset
class Counter:
    """A counter that can be increased and reset."""

    def __init__(self) -> None:
        self.value = 0

    def increment(self) -> int:
        """Increase the counter and return its value."""
        self.value += 1
        return self.value

    def reset(self) -> None:
        """Set the counter to zero."""
        self.value = 0


# ask: Write an LRU cache | Implement an LRU cache | Create a class for a least recently used cache | LRU cache
class LRUCache:
    """A cache that forgets the least recently used entry."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: OrderedDict = OrderedDict()

    def get(self, key: object) -> object:
        """Return the value of a key, or None."""
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key: object, value: object) -> None:
        """Store the value of a key."""
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


# ask: Write a class for a rectangle | Implement a Rectangle class | Create a Rectangle class with area and perimeter
class Rectangle:
    """A rectangle with a width and a height."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height

    def area(self) -> float:
        """Return the area of the rectangle."""
        return self.width * self.height

    def perimeter(self) -> float:
        """Return the perimeter of the rectangle."""
        return 2 * (self.width + self.height)
