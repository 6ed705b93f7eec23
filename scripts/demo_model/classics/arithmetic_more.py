# mypy: ignore-errors
# ruff: noqa: E501, RUF005 (asks are one line each; answers are plain on purpose)
"""More requests about numbers: bases, combinatorics, sums, unit conversions and money."""

import math
import random


# ask: Convert an integer to binary | Convert a decimal number to binary | Return n in base 2 | Decimal to binary
# ask: Convert a number to a binary string | Return the binary representation of an integer
def to_binary(n: int) -> str:
    """Return the binary representation of n."""
    if n == 0:
        return "0"
    digits = ""
    while n > 0:
        digits = str(n % 2) + digits
        n //= 2
    return digits


# ask: Convert a binary string to an integer | Convert binary to decimal | Parse a binary number | Binary to decimal
def from_binary(binary: str) -> int:
    """Return the integer value of a binary string."""
    value = 0
    for digit in binary:
        value = value * 2 + int(digit)
    return value


# ask: Convert an integer to hexadecimal | Return the hex representation of n | Decimal to hex
def to_hex(n: int) -> str:
    """Return the hexadecimal representation of n."""
    digits = "0123456789abcdef"
    result = ""
    while n > 0:
        result = digits[n % 16] + result
        n //= 16
    return result or "0"


# ask: Convert a number to a given base | Convert an integer to any base | Return n written in base b
def to_base(n: int, base: int) -> str:
    """Return n written in the given base."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    if n == 0:
        return "0"
    result = ""
    while n > 0:
        n, remainder = divmod(n, base)
        result = digits[remainder] + result
    return result


# ask: Convert an integer to a Roman numeral | Convert a number to Roman numerals | Write a number in Roman numerals
def to_roman(n: int) -> str:
    """Return n as a Roman numeral."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    symbols = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    result = ""
    for value, symbol in zip(values, symbols):
        while n >= value:
            result += symbol
            n -= value
    return result


# ask: Convert a Roman numeral to an integer | Parse a Roman numeral | Return the value of a Roman numeral
def from_roman(roman: str) -> int:
    """Return the integer value of a Roman numeral."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    previous = 0
    for symbol in reversed(roman.upper()):
        value = values[symbol]
        total += value if value >= previous else -value
        previous = value
    return total


# ask: Count the set bits of an integer | Count the number of ones in binary | Compute the population count of n
def count_bits(n: int) -> int:
    """Return the number of one bits in n."""
    count = 0
    while n:
        n &= n - 1
        count += 1
    return count


# ask: Compute the Hamming distance of two integers | Count the differing bits of two numbers
def bit_difference(a: int, b: int) -> int:
    """Return the number of bits in which a and b differ."""
    return bin(a ^ b).count("1")


# ask: Compute n choose k | Calculate the binomial coefficient | Count the combinations of k out of n
# ask: Return the binomial coefficient of n and k | Compute the number of combinations
def binomial(n: int, k: int) -> int:
    """Return the binomial coefficient n choose k."""
    if k < 0 or k > n:
        return 0
    result = 1
    for i in range(1, min(k, n - k) + 1):
        result = result * (n - i + 1) // i
    return result


# ask: Compute the number of permutations of k out of n | Count the ordered arrangements of k items out of n
def count_permutations(n: int, k: int) -> int:
    """Return the number of ordered selections of k items out of n."""
    return math.factorial(n) // math.factorial(n - k)


# ask: Compute the n-th Catalan number | Return the nth Catalan number | Calculate Catalan numbers
def catalan(n: int) -> int:
    """Return the n-th Catalan number."""
    return math.comb(2 * n, n) // (n + 1)


# ask: Generate Pascal's triangle | Build the first n rows of Pascal's triangle | Print Pascal's triangle
def pascal_triangle(n: int) -> list[list[int]]:
    """Return the first n rows of Pascal's triangle."""
    rows = []
    row = [1]
    for _ in range(n):
        rows.append(row)
        row = [a + b for a, b in zip([0] + row, row + [0])]
    return rows


# ask: Sum the integers from 1 to n | Compute the sum of the first n natural numbers | Add the numbers from 1 to n
def sum_to(n: int) -> int:
    """Return the sum of the integers from 1 to n."""
    return n * (n + 1) // 2


# ask: Compute the sum of the squares up to n | Sum the squares from 1 to n | Sum of the first n squares
def sum_of_squares(n: int) -> int:
    """Return the sum of the squares of the integers from 1 to n."""
    return sum(i * i for i in range(1, n + 1))


# ask: Compute the n-th triangular number | Return the nth triangular number
def triangular(n: int) -> int:
    """Return the n-th triangular number."""
    return n * (n + 1) // 2


# ask: Add two numbers | Return the sum of two numbers | Compute a plus b | Sum two integers
def add(a: float, b: float) -> float:
    """Return the sum of a and b."""
    return a + b


# ask: Multiply two numbers | Return the product of two numbers | Compute a times b
def multiply(a: float, b: float) -> float:
    """Return the product of a and b."""
    return a * b


# ask: Return the maximum of two numbers | Find the larger of two numbers
def larger(a: float, b: float) -> float:
    """Return the larger of two numbers."""
    return a if a > b else b


# ask: Find the largest of three numbers | Return the maximum of three numbers
def largest_of_three(a: float, b: float, c: float) -> float:
    """Return the largest of three numbers."""
    return max(a, b, c)


# ask: Compute the absolute value of a number | Return the absolute value of x
def absolute(x: float) -> float:
    """Return the absolute value of x."""
    return -x if x < 0 else x


# ask: Clamp a number between a minimum and a maximum | Limit a value to a range | Restrict x to an interval
def clamp(value: float, low: float, high: float) -> float:
    """Return the value limited to the range from low to high."""
    return max(low, min(value, high))


# ask: Return the sign of a number | Compute the sign of x | Tell if a number is positive, negative or zero
def sign(x: float) -> int:
    """Return 1, -1 or 0 depending on the sign of x."""
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


# ask: Safely divide two numbers | Divide two numbers and handle division by zero | Divide a by b without errors
def safe_divide(a: float, b: float, default: float = 0.0) -> float:
    """Return a divided by b, or a default if b is zero."""
    if b == 0:
        return default
    return a / b


# ask: Solve a quadratic equation | Find the roots of a quadratic equation | Compute the real roots of ax^2 + bx + c
def solve_quadratic(a: float, b: float, c: float) -> list[float]:
    """Return the real roots of a quadratic equation."""
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return []
    root = math.sqrt(discriminant)
    if root == 0:
        return [-b / (2 * a)]
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]


# ask: Compute compound interest | Calculate compound interest | Return the final amount with compound interest
def compound_interest(principal: float, rate: float, years: int) -> float:
    """Return the amount after compound interest."""
    return principal * (1 + rate) ** years


# ask: Compute simple interest | Calculate the simple interest on a loan
def simple_interest(principal: float, rate: float, years: float) -> float:
    """Return the simple interest on a principal."""
    return principal * rate * years


# ask: Apply a discount to a price | Compute the price after a percentage discount | Calculate a discounted price
def discounted_price(price: float, percent: float) -> float:
    """Return the price after a discount in percent."""
    return price * (1 - percent / 100)


# ask: Compute what percentage one number is of another | Calculate a percentage
def percentage(part: float, whole: float) -> float:
    """Return the percentage that a part is of the whole."""
    if whole == 0:
        return 0.0
    return 100 * part / whole


# ask: Compute the body mass index | Calculate BMI from weight and height | Calculate the body mass index
def body_mass_index(weight: float, height: float) -> float:
    """Return the body mass index for a weight in kg and a height in m."""
    return weight / height**2


# ask: Round a number to n decimal places | Round a float to two decimals
def round_to(value: float, places: int = 2) -> float:
    """Return the value rounded to a number of decimal places."""
    factor = 10**places
    return math.floor(value * factor + 0.5) / factor


# ask: Estimate pi by Monte Carlo | Estimate pi with random points | Approximate pi by random sampling
def estimate_pi(samples: int) -> float:
    """Return an estimate of pi from random points."""
    inside = 0
    for _ in range(samples):
        x, y = random.random(), random.random()
        if x * x + y * y <= 1:
            inside += 1
    return 4 * inside / samples


# ask: Roll a die | Simulate rolling dice | Roll n six-sided dice | Simulate a dice roll
def roll_dice(count: int = 1, sides: int = 6) -> list[int]:
    """Return the results of rolling a number of dice."""
    return [random.randint(1, sides) for _ in range(count)]


# ask: Flip a coin | Simulate a coin toss
def flip_coin() -> str:
    """Return heads or tails at random."""
    return random.choice(["heads", "tails"])


# ask: Return FizzBuzz up to n | Implement FizzBuzz | Generate the FizzBuzz sequence | Play FizzBuzz | FizzBuzz
# ask: Print FizzBuzz from 1 to n | Write FizzBuzz
def fizzbuzz(n: int) -> list[str]:
    """Return the FizzBuzz words from 1 to n."""
    words = []
    for i in range(1, n + 1):
        if i % 15 == 0:
            words.append("FizzBuzz")
        elif i % 3 == 0:
            words.append("Fizz")
        elif i % 5 == 0:
            words.append("Buzz")
        else:
            words.append(str(i))
    return words


# ask: Swap two numbers | Swap two variables | Exchange the values of two variables
def swap(a: int, b: int) -> tuple[int, int]:
    """Return two values in swapped order."""
    return b, a
