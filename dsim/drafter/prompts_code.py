"""Code prompts: templates, endings, word lists and snippets (`dsim.drafter.prompts` says what the slots mean)."""

from __future__ import annotations

TABLES = r"""
lang: Python; JavaScript; C; Java; Go; Rust; TypeScript; C++; Ruby; Kotlin
lang_ab: Python; JavaScript; Java; Go; C; Rust
func: reverses a string; counts the vowels in a string; checks whether a word is a palindrome; returns the largest
    number of a list; removes duplicates from a list and keeps the order; merges two sorted lists; computes the
    factorial of n; returns the first n Fibonacci numbers; checks whether a number is prime; lists all primes below n;
    finds the greatest common divisor of two integers; counts how often each word occurs; flattens a nested list;
    rotates a list by k places; finds the second largest value; transposes a matrix; multiplies two matrices; sums the
    digits of an integer; converts a number to binary; converts Roman numerals to integers; converts integers to Roman
    numerals; checks balanced brackets; finds the longest word in a sentence; capitalizes every word; removes all
    punctuation; counts the lines of a text; finds the missing number from 1 to n; finds two numbers with a given sum;
    shuffles a list; splits a list into chunks of size k; computes the mean and the median; computes the standard
    deviation; normalizes a list to the range 0 to 1; finds the mode of a list; checks whether two words are anagrams;
    groups words by their first letter; sorts a list of people by age; sorts words by length; does a binary search;
    does a linear search; implements bubble sort; implements insertion sort; implements merge sort; implements
    quicksort; validates an email address; validates a date in the form YYYY-MM-DD; parses a line of CSV; formats
    seconds as hours, minutes and seconds; computes the number of days between two dates; decides whether a year is a
    leap year; converts Celsius to Fahrenheit; computes the area of a polygon; computes the distance between two
    points; checks whether three sides form a triangle; computes compound interest; converts a hex color to RGB
    values; generates a random password; masks all but the last four digits of a card number; encodes text with a
    Caesar cipher; decodes run-length encoding; does run-length encoding; counts set bits; swaps the keys and values
    of a map; merges two maps and adds the values; filters even numbers; squares every number of a list; zips two
    lists into pairs; finds the intersection of two lists; finds the difference of two lists; computes a running
    total; computes a moving average; finds the longest common prefix; finds all substrings of length k; replaces tabs
    with spaces; wraps text at a given width; truncates text and adds an ellipsis; turns a title into a URL slug;
    converts snake case to camel case; converts camel case to snake case; counts characters without spaces; checks
    whether a string has only digits; removes leading zeros; pads a number with zeros; reads a file and returns its
    longest line; counts the words of a file; lists all files with a given ending; writes a list to a file, one item
    per line; appends a timestamped line to a log file; reads a JSON file and returns one field; retries an action up
    to three times; measures how long a call takes; caches the results of a slow call; limits calls to one per second;
    picks a random item by weight; rolls n dice and returns the sum; simulates coin flips; computes a letter grade
    from a score; computes the total price of a shopping cart; applies a discount to every price; finds the cheapest
    product; finds products that are out of stock; inverts a binary tree; computes the depth of a binary tree; walks a
    tree in order; reverses a linked list; detects a cycle in a linked list; finds the shortest path in a grid; counts
    islands in a grid; fills a region of a grid; prints a multiplication table; prints a triangle of stars; plays
    FizzBuzz up to n; computes powers without the power operator; computes a square root by Newton's method;
    approximates pi; computes binomial coefficients; lists all permutations of a list; lists all subsets of a set;
    solves a quadratic equation; evaluates a postfix expression; checks a Sudoku row; checks whether a tic-tac-toe
    board has a winner; validates a credit card number with the Luhn test; computes the edit distance of two words;
    compares two version numbers; finds the most recent date in a list; clamps a value to a range
func_name: process; compute; handle; run_step; update; collect; transform; check; build; scan; helper; reduce_all;
    convert; lookup; evaluate
var: items; values; numbers; rows; words; scores; prices; names; results; data; records; orders; lines; tokens; points
noun: user; order; product; invoice; book; student; ticket; message; playlist; recipe; employee; booking; vehicle;
    account; comment; task; photo; event; course; sensor reading; bank transfer; player; shipment; review
fields: an id, a name and a price; a title, an author and a year; a name, an email and an age; a start time, an end
    time and a place; an id, a status and a list of tags; a sender, a receiver and an amount; a label, a weight and a
    color; a date, a category and a note; a latitude, a longitude and a name; a user name, a score and a level
script: renames all images in a folder by date; counts the lines of all source files; finds duplicate files; backs up
    a folder to a dated archive; checks whether the links in a file look valid; converts CSV to
    JSON; converts JSON to CSV; merges several text files; prints the ten largest files; watches a folder for new
    files; removes empty folders; splits a large text file into parts; replaces a word in many files; prints a
    calendar of a month; converts temperatures from a file; sorts the lines of a file; prints a summary of a log file;
    checks free disk space; makes a table of contents for a Markdown file; generates invoices from a template; reports
    the most frequent words; resizes a list of images by name only; compares two folders; archives logs older than a
    week; creates a project skeleton; counts how often each error occurs in a log; numbers the lines of a file;
    extracts all email addresses from a file; prints a progress bar while it works; reminds the user of birthdays
regex_what: a date like 2024-05-17; a time like 09:45; an IPv4 address; a US phone number; a hex color; an email
    address; a URL with http or https; a five-digit postal code; a word that starts and ends with the same letter; a
    floating point number; a quoted string; a variable name; a hashtag; a version number like 1.12.3; a line that is
    blank or has only spaces; a repeated word; a file name that ends in .jpg or .png; a license plate of two letters
    and four digits; a price with a dollar sign; an HTML tag
schema: customers(id, name, city), orders(id, customer_id, total, ordered_at); books(id, title, author_id, year),
    authors(id, name, country); students(id, name, grade), enrollments(student_id, course, score); employees(id, name,
    department_id, salary), departments(id, name); movies(id, title, year), ratings(movie_id, user_id, stars);
    products(id, name, price, stock), sales(product_id, quantity, sold_on); flights(id, origin, destination,
    departs_at), tickets(flight_id, passenger, price); teams(id, name, city), games(home_id, away_id, home_goals,
    away_goals); rooms(id, hotel, beds), bookings(room_id, guest, start_date, end_date); posts(id, user_id, text,
    created_at), likes(post_id, user_id); sensors(id, location), readings(sensor_id, value, read_at); patients(id,
    name, birth_year), visits(patient_id, doctor, visit_date); accounts(id, owner, balance), transfers(from_id, to_id,
    amount, made_at); songs(id, title, artist, seconds), plays(song_id, user_id, played_at)
sql_want: counts the rows of the second table for each row of the first; lists the rows of the first table that have
    no match in the second; returns the {3..20} rows with the largest numbers; returns one row per month with a total;
    returns the average by group, only for groups with more than {2..20} rows; joins both tables and sorts the result
    by name; finds duplicates by name; returns the newest entry for each row of the first table; shows a running
    total; updates one column for all rows that match a condition; deletes rows of the second table that are older
    than a year; ranks the rows with a window function; returns the share of each group in percent
complexity: looking up a key in a hash map; inserting at the front of an array; binary search in a sorted array;
    sorting with merge sort; checking all pairs of n items; building all subsets of n items; a breadth-first search of
    a graph; finding the minimum of an unsorted list; a naive recursive Fibonacci function; two nested loops where the
    inner one halves its range; inserting into a balanced tree; matrix multiplication by the school method; removing
    duplicates with a nested loop; removing duplicates with a set; popping from a heap; string concatenation in a
    loop; a depth-first search of a tree; heap sort; counting sort with k values; permutations of n items
concept_code: recursion; a closure; a pointer; garbage collection; a hash table; a race condition; an API; a unit
    test; version control; an interface; inheritance; composition; a stack; a queue; a linked list; a binary tree; big
    O notation; a callback; a promise; asynchronous code; a thread; a process; a mutex; dependency injection; an index
    in a database; a transaction; normalization of tables; a foreign key; a virtual environment; a package manager; a
    compiler; an interpreter; type inference; generics; immutability; a pure function; a decorator; a generator; an
    iterator; list comprehensions; exceptions; logging levels; environment variables; a Docker container; continuous
    integration; a code review; a merge conflict; a REST endpoint; HTTP status codes; JSON; YAML; regular expressions;
    caching; memoization; load balancing; a message queue; a web socket; a cookie; hashing of passwords; SQL
    injection; cross-site scripting; a linter; a debugger; technical debt; refactoring; a singleton; the observer
    pattern; the factory pattern; a state machine; an enum; a struct; operator overloading; pass by reference; integer
    overflow; floating point rounding; Unicode and UTF-8; time zones in software; feature flags; semantic versioning;
    a binary heap
reader: a beginner; a junior developer; a colleague who knows only spreadsheets; a student before an exam; a designer;
    a manager; a developer who comes from Java; a child who likes robots; a data analyst; a hobby programmer
page: a contact form; a pricing table; a photo gallery; a login form; a recipe card; a navigation bar; a blog post; a
    to-do list; a product card; a profile page; a countdown; a quiz; an event calendar; a footer with links; a
    newsletter signup; a timeline; a dark mode switch; a weather card; a search box; a cookie notice
css_effect: a button that grows on hover; a two-column layout that stacks on phones; a sticky header; a centered box;
    a card with a soft shadow; a striped table; a loading spinner; a fixed footer; a grid of equal cards; rounded
    images; a tooltip; a progress bar; a drop-down menu; a fade-in headline; a responsive font size
config: a web server; a logging system; a backup job; a chat bot; a build pipeline; a game; a mail client; a photo
    app; a weather station; a test runner; a music player; a job scheduler; a database connection; a static site; a
    home heating system; a robot arm
config_keys: host, port and timeout; name, version and a list of plugins; a schedule, a target and retries; log level,
    log file and maximum size; width, height and theme; a list of users with roles; two environments, development and
    production; an input folder, an output folder and patterns; cache size, cache time and a switch; three steps with
    names and commands
struct: stack; queue; linked list; binary search tree; priority queue; least-recently-used cache; graph; trie; ring
    buffer; matrix; set; counter; timer; bank account; shopping cart; deck of cards; parking lot; inventory; phone
    book; rate limiter; event bus; undo history; chess board; state machine; text buffer
methods: push, pop and peek; add, remove and contains; insert, delete and find; get, set and size; start, stop and
    reset; enqueue, dequeue and is-empty; deposit, withdraw and history; load, save and clear
bash_want: counts the files in each subfolder; prints the five most frequent words of a file; finds files larger than
    {2..90} megabytes; renames all .txt files to .md; shows the last {5..50/5} lines of every log file; deletes files
    older than {3..60} days after asking; prints the disk usage of each home folder; checks whether a program is
    installed; loops over a list of servers and pings each one; extracts the second column of a CSV file; replaces
    spaces in file names with underscores; makes a dated backup of a folder; prints the lines that two files share;
    measures how long a command takes; counts how many times "{error|warning|timeout|failed}" occurs in a log; lists
    the processes that use port {3000..9000/10}
git_want: undo the last commit but keep the changes; rename a branch; find the commit that introduced a bug; remove a
    file from the history of the last commit; combine {2..6} commits into one; see who changed a line; move a commit
    to another branch; throw away local changes in one file; tag a release as version {1..9}.{0..20}; resolve a merge
    conflict; show the changes of the last {2..14} days; stash changes and get them back; compare two branches;
    recover a deleted branch
error_msg: IndexError: list index out of range; KeyError: 'name'; TypeError: unsupported operand type(s) for +: 'int'
    and 'str'; ZeroDivisionError: division by zero; RecursionError: maximum recursion depth exceeded;
    ModuleNotFoundError: No module named 'requests'; Segmentation fault (core dumped); NullPointerException; undefined
    is not a function; cannot borrow as mutable because it is also borrowed as immutable; CORS policy: No
    'Access-Control-Allow-Origin' header; permission denied; connection refused; UnicodeDecodeError: invalid start
    byte; stack overflow; out of memory; deadlock found when trying to get lock; syntax error near unexpected token;
    IndentationError: unexpected indent; AttributeError: 'NoneType' object has no attribute 'strip'
doing: reading a CSV file; looping over a list; joining two tables; parsing a date; calling a web service; opening a
    log file; sorting a list of records; saving a form; starting the test suite; drawing a chart; loading a config
    file; merging two branches; sending an email; resizing a picture
style_rule: short functions; clear names; no global variables; type hints; early returns; no nested loops; only the
    standard library; small classes; useful error messages; constants instead of magic numbers
app: to-do app; weather station; chat server; photo sorter; budget tracker; quiz game; recipe manager; habit tracker;
    bus timetable; file converter; music player; library catalog; ticket system; URL shortener; note-taking tool;
    hangman game; snake game; currency converter; poll website; step counter
"""

_SNIPPET = r"""
def {func_name1}({var1}):
    return [v * {2..9} for v in {var1} if v > {1..40}]
---
def {func_name1}({var1}):
    total = {0..9}
    for v in {var1}:
        total += v % {2..9}
    return total
---
def {func_name1}(n):
    if n <= {1..3}:
        return 1
    return n * {func_name1}(n - 1)
---
def {func_name1}(text):
    counts = {}
    for c in text:
        counts[c] = counts.get(c, 0) + {1..3}
    return max(counts, key=counts.get)
---
{var1} = [{1..20}, {1..20}, {1..20}, {1..20}]
{var1}.sort(reverse=True)
print({var1}[:{2..3}])
---
def {func_name1}(a, b):
    while b:
        a, b = b, a % b
    return a

print({func_name1}({12..90}, {12..90}))
---
x = {2..30}
while x != 1:
    x = x // 2 if x % 2 == 0 else 3 * x + 1
    print(x)
---
{var1} = {10..40}
for i in range({2..6}):
    if i % 2:
        {var1} -= i
    else:
        {var1} += {2..7}
print({var1})
---
with open('{var1}.txt') as f:
    lines = [line.strip() for line in f if len(line) > {5..80}]
print(len(lines))
---
function {func_name1}({var1}) {
  return {var1}.filter(v => v > {1..50}).map(v => v * {2..9});
}
---
const {var1} = [{1..20}, {1..20}, {1..20}];
const out = {var1}.reduce((a, b) => a + b, {0..9});
console.log(out);
---
function {func_name1}(n) {
  let s = '';
  for (let i = 0; i < n; i += {1..4}) {
    s = i + s;
  }
  return s;
}
---
int {func_name1}(int n) {
    int s = 0;
    for (int i = {0..3}; i < n; i++)
        s += i * {2..9};
    return s;
}
---
int {func_name1}(const char *s) {
    int n = {0..2};
    while (*s++)
        n++;
    return n;
}
---
for f in *.{txt|log|csv|md}; do
  wc -l "$f"
done | sort -n | tail -{2..20}
---
SELECT city, COUNT(*) FROM {var1}
WHERE total > {10..900/10}
GROUP BY city
HAVING COUNT(*) > {2..20};
---
func {func_name1}({var1} []int) int {
    best := {var1}[0]
    for _, v := range {var1} {
        if v > best+{1..9} {
            best = v
        }
    }
    return best
}
---
fn {func_name1}({var1}: &[i32]) -> i32 {
    {var1}.iter().filter(|v| **v % {2..9} == 0).sum()
}
---
public static int {func_name1}(int[] {var1}) {
    int c = 0;
    for (int v : {var1}) if (v < {5..90}) c++;
    return c;
}
"""

_BUGGY = r"""
def {func_name1}({var1}):
    best = 0
    for v in {var1}:
        if v > best:
            best = v
    return best

print({func_name1}([-{1..9}, -{2..9}]))
---
def {func_name1}({var1}=[]):
    {var1}.append({1..99})
    return {var1}
---
def {func_name1}({var1}):
    total = 0
    for i in range(1, len({var1})):
        total += {var1}[i]
    return total / {2..9}
---
def {func_name1}(n):
    if n = {0..9}:
        return True
    return False
---
def {func_name1}({var1}):
    for v in {var1}:
        if v < {2..50}:
            {var1}.remove(v)
    return {var1}
---
def {func_name1}(n):
    return n * {func_name1}(n - {1..3})
---
age = input('Age? ')
if age > {12..65}:
    print('welcome')
---
def {func_name1}(text):
    text.upper()
    text.replace('{a|e|o}', '{x|y|z}')
    return text
---
for (var i = 0; i < {3..12}; i++) {
  setTimeout(function () { console.log(i); }, {100..900/100});
}
---
function {func_name1}({var1}) {
  for (let i = 0; i <= {var1}.length; i++) {
    console.log({var1}[i] * {2..9});
  }
}
---
function {func_name1}(a) {
  return
    a + {1..99};
}
---
int {var1}[{4..12}];
for (int i = 0; i <= {13..20}; i++)
    {var1}[i] = i * {2..9};
---
char *{func_name1}(void) {
    char text[{8..64/8}];
    strcpy(text, "{hello|ready|done}");
    return text;
}
---
if (name == "{Anna|Bob|Chen|Dora}") {
    count = count + {1..9};  // Java, name is a String
}
---
SELECT name, COUNT(*) FROM {var1} WHERE COUNT(*) > {2..30} GROUP BY name;
---
DELETE FROM {var1};  -- I only wanted to delete the row with id {1..900}
---
if [ $count > {2..90} ]; then
  echo "too many {var1}"
fi
---
{var1} = [[0] * {2..9}] * {2..9}
{var1}[0][0] = {1..9}
print({var1})
"""

SNIPPETS = {
    "snippet": tuple(_SNIPPET.strip("\n").split("\n---\n")),
    "buggy": tuple(_BUGGY.strip("\n").split("\n---\n")),
}

ENDINGS = r"""
code: Add comments.; Include a short usage example.; Do not use any library.; Explain the idea in two sentences before
    the code.; Handle invalid input.; State the time complexity.; Add a docstring.; Only output the code.; Add type
    annotations where the language has them.; Add three test cases.; Explain every line afterward.; Use {style_rule}.;
    First list the edge cases, then write the code.
talk: Keep it under {60..150/10} words.; Give one small code example.; Use an analogy from daily life.; Explain it to
    {reader}.; Use bullet points.; Mention one common mistake.; Add a short example in {lang}.; End with a rule of
    thumb.
look: Explain it line by line.; Answer in at most three sentences.; Then suggest one improvement.; Explain it to
    {reader}.; State the output for a small input.; Point out what happens with empty input.; Also suggest better
    names.; Give the time complexity.
"""

TEMPLATES = r"""
write @code: Write a(n) {lang} function that {func}.
write-please @code: Could you show me how to write a function in {lang} that {func}?
write-named @code: In {lang}, write a function named {func_name} that takes {var} and {func}.
write-program @code: Write a complete {lang} program that reads input from the user and then {func}.
write-two @code: Write a Python module with two functions: one that {func} and one that {func}.
write-ways: Show {2..3} different ways in {lang} to write a function that {func}, and say which one you prefer.
write-recursive: Write a(n) {lang} function that {func}, once with a loop and once with recursion if that makes sense.
write-oneliner: Is there a one-line solution in {Python|JavaScript|Ruby} for a function that {func}? Show it and a
    more readable version.
write-signature: Complete this function: def {func_name}({var}): # it {func}
write-js @code: I need a JavaScript helper for my website that {func}. It will be called on every key press.
write-c @code: Write a function in plain C that {func}. Say who owns the memory that you allocate.
write-java @code: Write a Java class with a static method that {func} and a main method that shows it.
write-go @code: Write idiomatic Go code that {func} and returns an error when the input is bad.
write-rust @code: Write a Rust function that {func}. Choose good argument types and explain the borrowing.
write-limit: Write a(n) {lang} function that {func} in at most {5..25} lines, using {style_rule}.
write-big: How would you write a(n) {lang} function that {func} when the input has {2..90} million entries?
write-stream: Write a Python generator version of a function that {func}, so that it also works for data that does not
    fit in memory.
write-pseudo @talk: Describe in pseudocode a function that {func}.
write-steps: Explain step by step, without code, how a function that {func} should work. Then write it in {lang}.
write-spec: Write a short specification for a function that {func}: inputs, outputs, errors and {2..4} examples.
write-beginner: A student has to write a(n) {lang} function that {func}. Give {2..4} hints, but not the full solution.
write-interview: Act as an interviewer and ask me to write a function that {func}. List {2..4} follow-up questions
    about it.
explain @look: Explain what this code does:\n\n{snippet}
explain-output: What does the following code print or return, and why?\n\n{snippet}
explain-comment: Add a helpful comment to each line of this code:\n\n{snippet}
explain-name: Suggest a better name for the function and the variables in this code and explain your
    choice:\n\n{snippet}
explain-docstring: Write documentation for the following code, with parameters, return value and one
    example:\n\n{snippet}
explain-complexity: What are the time and memory complexity of this code?\n\n{snippet}
explain-edge: Which inputs could make this code fail or give a strange result?\n\n{snippet}
explain-review: Review this code as a colleague would, with {2..4} comments that are kind and specific:\n\n{snippet}
explain-refactor: Refactor this code with one aim, {style_rule}, and show the result:\n\n{snippet}
explain-trace: Trace this code by hand with a small input and show the values of all variables in a
    table:\n\n{snippet}
explain-test: Write {2..5} unit tests for this code:\n\n{snippet}
explain-faster: Can this code be made faster or shorter? Show your version and compare the two.\n\n{snippet}
explain-log: Add logging and input checks to this code without changing what it returns:\n\n{snippet}
explain-poem: Describe what this code does in plain English for {reader}, without any technical terms:\n\n{snippet}
convert-snippet: Rewrite this code in {lang}:\n\n{snippet}
convert-two: Translate the following code to {lang_ab} and to {lang_ab}, and note what differs:\n\n{snippet}
convert-style: Rewrite this code in a(n) {functional|object-oriented|procedural|more defensive|more readable}
    style:\n\n{snippet}
convert-func: I have a(n) {lang_ab} function that {func}. What should I watch out for when I port it to {lang_ab}?
convert-idiom @talk: How does error handling in {lang_ab} differ from error handling in {lang_ab}?
convert-cheat: Make a small cheat sheet, {lang_ab} next to {lang_ab}, for loops, lists, maps, functions and {reading a
    file|string formatting|sorting|tests|classes|imports}.
bug @look: Find and fix the bug in this code:\n\n{buggy}
bug-why: This code does not do what I want. Explain why, and show a corrected version.\n\n{buggy}
bug-hint: My student wrote the code below. Give a hint that leads to the bug without giving the answer.\n\n{buggy}
bug-test: Write a test that fails because of the bug in this code, then fix the code:\n\n{buggy}
bug-report: Write a bug report for the problem in this code, with steps, expected and actual behavior:\n\n{buggy}
bug-class: What is this kind of mistake called, and how can a team avoid it in the future?\n\n{buggy}
bug-spot: Is there anything wrong with the following code? Answer yes or no first.\n\n{buggy}
error @talk: While {doing} I get the error "{error_msg}". What does it mean and how do I fix it?
error-steps: My program stops with "{error_msg}" after {doing}. Give me a checklist of {3..6} things to look
    at.
error-prevent @talk: How can I prevent the error "{error_msg}" in a larger project?
error-cause: What are the {2..4} most likely reasons for "{error_msg}" when {doing}?
error-handle: Show how to catch the problem behind "{error_msg}" and give the user a useful message while
    {doing}.
error-beginner: Explain the message "{error_msg}" to {reader} who was just {doing}.
test-func @code: Write unit tests in {lang} for a function that {func}.
test-cases: List {4..9} test cases, including edge cases, for a function that {func}. Use a table with input and
    expected output.
test-pytest @code: Write a pytest file with parametrized tests for a Python function called {func_name} that {func}.
test-property: Suggest {2..4} properties that must always hold for a function that {func}, and write a test for one of
    them.
test-mock: How would you test a(n) {lang} function that is {doing} without touching the real system? Show a short
    example.
test-first: Use test-driven development to write a(n) {lang} function that {func}. Show the first {2..3} cycles of
    test
    and code.
docstring: Write a docstring in {NumPy|Google|Sphinx} style for a Python function called {func_name} that {func}.
readme: Write a short README for a(n) {lang} {app}, with the sections install, usage and license.
changelog: Write a changelog entry for version {1..9}.{0..20} of a(n) {app} that fixed "{error_msg}" and added a
    feature
    for {buyer}.
commit: Write a good commit message for a change to a(n) {app} that now {func}.
comment-style @talk: When should {reader} write comments in {lang} code, and when not?
api-doc: Document a REST endpoint of a(n) {app} that returns a(n) {noun} with {fields}. Include an example response.
regex @look: Write a regular expression that matches {regex_what}.
regex-use: Write {lang} code that uses a regular expression to find {regex_what} in a text and prints each match.
regex-tests: Give a regular expression for {regex_what}, with {3..5} strings that match and {3..5} strings that do
    not.
regex-replace: How can I replace {regex_what} with "{redacted|removed|hidden|n/a}" everywhere in a file, using
    {sed|Python|JavaScript|an editor}?
regex-explain: Explain part by part a pattern that matches {regex_what}, to {reader}.
sql: Given the tables {schema}, write a SQL query that {sql_want}.
sql-explain: For the tables {schema}, write a SQL query that {sql_want}, and explain each clause to {reader}.
sql-index: The tables are {schema}. A query that {sql_want} is slow. Which index would help, and why?
sql-create: Write CREATE TABLE statements for {schema}, with sensible types, keys and one check constraint.
sql-insert: Write INSERT statements with {3..8} made-up rows for each of these tables: {schema}.
sql-view: Create a view on the tables {schema} that {sql_want}, and show how to use it.
sql-orm: The tables are {schema}. Show how to get the result of a query that {sql_want} in plain Python with lists of
    dictionaries.
sql-questions: Write {4..8} practice questions for SQL beginners about the tables {schema}, from easy to hard.
sql-schema: Design a small database for a(n) {app} that stores each {noun} with {fields}. List tables, columns and
    keys.
bash @look: Write a Bash script that {bash_want}.
bash-line: Give me a one-line shell command that {bash_want}, and explain each part of it.
bash-python: Write a Python script that does the same as a shell command that {bash_want}.
bash-safe: What can go wrong with a shell script that {bash_want}? Write a version that is careful with odd file
    names.
git @talk: How do I use git to {git_want}?
git-explain: Explain to {reader} how to {git_want} with git, and what could go wrong.
git-compare: I want to {git_want} and then {git_want}. Give the git commands in order, with one comment each.
cli @code: Write a command line tool in {Python|Go|Rust|Bash|Node.js} that {script}.
cli-args: Write a Python script with argparse that {script}. It should have the options
    {--verbose|--dry-run|--quiet|--force} and {--output|--limit|--since|--format}.
cli-plan @talk: I want to write a script that {script}. How should I structure it?
cli-help: Write the help text of a command line tool called {func_name} that {script}, with {3..6} options.
cli-exit: Which errors should a tool that {script} report, and with which exit codes? Make a table.
cli-cron: How do I run a script that {script} every {weekday} at {1..11}:{10..50/10} on Linux, and where do its
    messages go?
dataclass @code: Write a Python dataclass for a(n) {noun} with {fields}.
class @code: Implement a(n) {struct} class in {lang} with the methods {methods}.
class-design @talk: How would you design the classes of a(n) {app} in {lang}? Name the classes and what each of them
    does.
class-struct: Define a {C struct|Go struct|Rust struct|TypeScript interface|Java record|Kotlin data class} for a(n)
    {noun} with {fields}, and a function that prints it.
class-validate: Write a(n) {lang} class for a(n) {noun} with {fields} that refuses invalid values with a clear error.
class-compare: Should a(n) {struct} in {lang} be a class, a struct or just functions? Discuss it for {reader}.
struct-explain @talk: What is a(n) {struct} good for in a program, and how does it work inside?
struct-choose: Which data structure fits best to store {2..900} thousand records of the type {noun} with {fields} if I
    mostly {look up by id|add to the end|sort by date|delete the oldest|search by prefix}?
json: Write a JSON example of a(n) {noun} with {fields}, and then a JSON list with {2..5} of them.
json-schema: Write a JSON schema for a(n) {noun} with {fields}. Mark which fields are required.
json-parse: Write {lang} code that parses a JSON text with a list of records of the type {noun} with {fields} and
    prints the first one.
yaml: Write a YAML configuration file for {config} with {config_keys}.
yaml-convert: Show the same configuration of {config} with {config_keys} as JSON, as YAML and as TOML.
config-load: Write {lang} code that loads the configuration of {config} with {config_keys} and uses defaults for what
    is missing.
config-review @talk: What makes a good configuration file for {config} with {config_keys}?
docker: Write a Dockerfile for a(n) {lang} {app} that listens on port {3000..9000/10}, and explain each line.
ci: Write a continuous integration file that builds and tests a(n) {lang} {app} on every push, with {2..4} jobs.
complexity @talk: What is the time complexity of {complexity}, and why?
complexity-two: Compare the time complexity of {complexity} with that of {complexity} for n = {100..9000/100}.
complexity-measure: How can I measure in {lang} whether {complexity} scales as theory says? Write a small benchmark.
complexity-quiz: Write a multiple-choice question about the time complexity of {complexity}, with four options and an
    explanation for {reader}.
complexity-func: What is the best possible time complexity of a function that {func}? Justify it briefly for {reader}.
concept @talk: In programming, what do people mean by {concept_code}?
concept-reader: Explain {concept_code} to {reader} in about {60..150/10} words.
concept-two @talk: What is the connection between {concept_code} and {concept_code}?
concept-show: Show a short {lang} example that demonstrates {concept_code}, and describe the output.
concept-when: When should a team that builds a(n) {app} use {concept_code}, and when is it a bad idea?
concept-quiz: Write {3..6} interview questions about {concept_code} for {reader}, with short answers.
concept-myth: Name {2..3} common misunderstandings about {concept_code} and correct them for {reader}.
html: Write the HTML for {page} with clear labels and good accessibility, for a(n) {app}.
html-css: Write HTML and CSS for {page} in {color} and {color}, with a layout that works on phones.
html-js: Write HTML and JavaScript for {page} that checks the input and shows a message after {2..9} seconds.
css: Write CSS for {css_effect} on {page}, and explain each property.
css-fix: My CSS for {css_effect} does not work on {page}. Which {3..5} things should I check first?
css-compare @talk: Is it better to build {css_effect} with flexbox or with grid?
react: Write a small {React|Vue|Svelte} component for {page} that shows a list of {var} and handles the empty case.
api: Write a small web API in {Python|Go|Node.js|Java} for a(n) {app} with endpoints to list, create and delete a(n)
    {noun}.
api-client: Write {lang} code that calls an API of a(n) {app}, reads a(n) {noun} with {fields}, and handles a timeout
    of
    {2..30} seconds.
app-plan @talk: I want to build a(n) {app} in {lang} for {reader}. What are the first steps?
app-features: List {4..9} features of a minimal {app}, ordered by importance, and say which {lang} libraries or tools
    might help.
app-files: Propose a folder structure for a(n) {lang} {app} with tests and documentation, as a tree.
app-story: Write {3..6} user stories for a(n) {app} that manages each {noun} with {fields}.
app-debug: Users say that our {app} gets slow after {2..30} hours. Write a plan to find the cause in the {lang} code.
game: Write a text version of a {hangman|number guessing|rock paper scissors|tic-tac-toe|word scramble|memory} game in
    {lang} for {2..4} players, using {style_rule}.
style @talk: Give {3..6} tips for {style_rule} in {lang}.
style-compare: Show a bad and a good {lang} example for the rule "{style_rule}" with a function that {func}.
lang-choose @talk: Which language would you choose for a(n) {app}: {lang}, {lang} or {lang}?
lang-learn: Make a {2..8} week plan to learn {lang} for {reader} who wants to build a(n) {app}.
format-print: In {lang}, how do I print a table of {var} with aligned columns, {2..4} decimals and a header?
random-seed: Write {lang} code that makes {10..900/10} random test records of the type {noun} with {fields}, the same
    ones on every run.
concurrency @talk: How can a(n) {lang} program process {50..900/50} files of {var} at the same time without mixing up
    the
    results?
memory @talk: Why might a(n) {lang} {app} use more and more memory over {2..60} hours?
security @talk: What are the {3..5} most important security rules for a(n) {app} that stores each {noun} with
    {fields}?
estimate: How long would it take {reader} to write a(n) {lang} {app}? Break it into {4..7} tasks with hours, in a
    table.
"""
