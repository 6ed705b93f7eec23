# mypy: ignore-errors
# ruff: noqa: E501, SIM110 (asks are one line each; answers are plain on purpose)
"""Common requests about numbers. Each function is one answer; `# ask:` lists other wordings of its docstring."""

import math


# ask: Compute the nth Fibonacci number | Find the n-th number of the Fibonacci sequence | Calculate fibonacci(n)
# ask: Return the nth Fibonacci number | Get the Fibonacci number at position n | Fibonacci
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


# ask: Compute the n-th Fibonacci number recursively | Return the n-th Fibonacci number using recursion
def fibonacci_recursive(n: int) -> int:
    """Return the n-th Fibonacci number by recursion."""
    if n < 2:
        return n
    return fibonacci_recursive(n - 1) + fibonacci_recursive(n - 2)


# ask: List the first n Fibonacci numbers | Generate the Fibonacci sequence up to n terms
# ask: Generate the first n Fibonacci numbers | Print the first n Fibonacci numbers
def fibonacci_sequence(n: int) -> list[int]:
    """Return the first n Fibonacci numbers as a list."""
    result = []
    a, b = 0, 1
    for _ in range(n):
        result.append(a)
        a, b = b, a + b
    return result


# ask: Compute the factorial of a number | Calculate n! | Compute n factorial | Find the factorial of n | Factorial
# ask: Return the factorial of a non-negative integer | Calculate the factorial of an integer
def factorial(n: int) -> int:
    """Return the factorial of n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


# ask: Compute the factorial of n recursively | Return the factorial of a number using recursion
def factorial_recursive(n: int) -> int:
    """Return the factorial of n by recursion."""
    if n <= 1:
        return 1
    return n * factorial_recursive(n - 1)


# ask: Check whether a number is prime | Check if n is a prime number | Determine if a number is prime
# ask: Test whether an integer is prime | Tell whether a number is prime | Is prime | Check primality
def is_prime(n: int) -> bool:
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):
        if n % i == 0:
            return False
    return True


# ask: List all prime numbers up to n | Find all primes below n | Generate primes with the sieve of Eratosthenes
# ask: Implement the sieve of Eratosthenes | Return all prime numbers up to n | Get the primes up to a limit
def sieve(limit: int) -> list[int]:
    """Return all prime numbers up to the limit."""
    is_prime = [True] * (limit + 1)
    primes = []
    for number in range(2, limit + 1):
        if is_prime[number]:
            primes.append(number)
            for multiple in range(number * number, limit + 1, number):
                is_prime[multiple] = False
    return primes


# ask: List the first n primes | Return the first n prime numbers | Generate the first n prime numbers
def first_primes(n: int) -> list[int]:
    """Return the first n prime numbers."""
    primes: list[int] = []
    candidate = 2
    while len(primes) < n:
        if all(candidate % p != 0 for p in primes):
            primes.append(candidate)
        candidate += 1
    return primes


# ask: Find the next prime after n | Find the smallest prime larger than n
def next_prime(n: int) -> int:
    """Return the smallest prime greater than n."""
    candidate = max(n + 1, 2)
    while any(candidate % i == 0 for i in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


# ask: Find the prime factors of a number | Factor an integer into primes | Compute the prime factorization of n
# ask: Return the prime factors of n | Factorize a number | List the prime factors of an integer
def prime_factors(n: int) -> list[int]:
    """Return the prime factors of n."""
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return factors


# ask: Compute the greatest common divisor of two numbers | Find the gcd of a and b | Calculate the GCD | gcd
# ask: Return the greatest common divisor of two integers | Implement Euclid's algorithm
def gcd(a: int, b: int) -> int:
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return abs(a)


# ask: Compute the least common multiple of two numbers | Find the lcm of a and b | Calculate the LCM of two integers
# ask: Return the least common multiple of two integers | lcm
def lcm(a: int, b: int) -> int:
    """Return the least common multiple of a and b."""
    if a == 0 or b == 0:
        return 0
    return abs(a * b) // math.gcd(a, b)


# ask: Compute the gcd of a list of numbers | Find the greatest common divisor of a list
def gcd_of_list(numbers: list[int]) -> int:
    """Return the greatest common divisor of a list of integers."""
    result = 0
    for number in numbers:
        result = math.gcd(result, number)
    return result


# ask: Check if a number is even | Test whether an integer is even | Determine if n is even | Tell if a number is even
def is_even(n: int) -> bool:
    """Return True if n is even."""
    return n % 2 == 0


# ask: Check if a number is odd | Test whether an integer is odd | Determine if n is odd
def is_odd(n: int) -> bool:
    """Return True if n is odd."""
    return n % 2 != 0


# ask: Sum the digits of a number | Compute the sum of the digits of an integer | Add up the digits of n
# ask: Calculate the digit sum of a number | Return the sum of digits of a number
def sum_of_digits(n: int) -> int:
    """Return the sum of the digits of n."""
    total = 0
    n = abs(n)
    while n > 0:
        total += n % 10
        n //= 10
    return total


# ask: Count the digits of a number | Count how many digits an integer has | Return the number of digits in n
def count_digits(n: int) -> int:
    """Return the number of digits of n."""
    return len(str(abs(n)))


# ask: Reverse the digits of a number | Reverse an integer | Return an integer with its digits reversed
def reverse_number(n: int) -> int:
    """Return n with its digits reversed."""
    sign = -1 if n < 0 else 1
    return sign * int(str(abs(n))[::-1])


# ask: Check if a number is a palindrome | Test whether an integer is a palindrome | Is n a palindromic number
def is_palindrome_number(n: int) -> bool:
    """Return True if the digits of n read the same backwards."""
    text = str(n)
    return text == text[::-1]


# ask: Check if a number is a perfect square | Test whether n is a perfect square | Determine if n is a square number
def is_perfect_square(n: int) -> bool:
    """Return True if n is a perfect square."""
    if n < 0:
        return False
    root = math.isqrt(n)
    return root * root == n


# ask: Check if a number is perfect | Test whether n is a perfect number | Determine if n equals the sum of its divisors
def is_perfect_number(n: int) -> bool:
    """Return True if n equals the sum of its proper divisors."""
    return n > 1 and sum(i for i in range(1, n) if n % i == 0) == n


# ask: Check if a number is an Armstrong number | Test for a narcissistic number | Is n an Armstrong number
def is_armstrong(n: int) -> bool:
    """Return True if n is an Armstrong number."""
    digits = [int(d) for d in str(n)]
    return n == sum(d ** len(digits) for d in digits)


# ask: Check if a number is a power of two | Test whether n is a power of 2 | Determine if an integer is a power of two
def is_power_of_two(n: int) -> bool:
    """Return True if n is a power of two."""
    return n > 0 and n & (n - 1) == 0


# ask: Check if a year is a leap year | Test whether a year is a leap year | Determine if year is leap | Is leap year
def is_leap_year(year: int) -> bool:
    """Return True if the year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


# ask: Find all divisors of a number | List the factors of n | Return all divisors of an integer | Get divisors of n
def divisors(n: int) -> list[int]:
    """Return all divisors of n."""
    return [i for i in range(1, n + 1) if n % i == 0]


# ask: Raise a number to a power | Compute x to the power of n | Compute the power of a number
# ask: Implement fast exponentiation | Calculate base raised to exponent | Compute exponents by squaring
def power(base: float, exponent: int) -> float:
    """Return base raised to the exponent."""
    if exponent < 0:
        return 1 / power(base, -exponent)
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


# ask: Compute the square root of a number with Newton's method | Approximate a square root
# ask: Calculate the square root of x by Newton's method | Find the square root of a number without math
def square_root(x: float, tolerance: float = 1e-10) -> float:
    """Return the square root of x by Newton's method."""
    if x < 0:
        raise ValueError("x must not be negative")
    guess = x or 1.0
    while abs(guess * guess - x) > tolerance:
        guess = (guess + x / guess) / 2
    return guess


# ask: Compute the integer square root | Find the floor of the square root of n
def integer_sqrt(n: int) -> int:
    """Return the integer square root of n."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        if middle * middle <= n:
            low = middle
        else:
            high = middle - 1
    return low


# ask: Generate the Collatz sequence of n | List the Collatz sequence starting at n | Compute the Collatz sequence
def collatz(n: int) -> list[int]:
    """Return the Collatz sequence starting at n."""
    sequence = [n]
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        sequence.append(n)
    return sequence
