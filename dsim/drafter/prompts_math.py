"""Math prompts: templates, endings and word lists (`dsim.drafter.prompts` says what the slots mean)."""

from __future__ import annotations

TABLES = r"""
name: Aisha; Ben; Carla; Dmitri; Elena; Farid; Greta; Hiro; Ines; Jamal; Katya; Liam; Mei; Nadia; Omar; Priya;
    Quentin; Rosa; Samir; Tessa; Uma; Victor; Wanda; Xavier; Yara; Zane; Anders; Bianca; Chidi; Daphne; Emil; Fiona;
    Gustav; Hana; Igor; Joanna; Kofi; Lucia; Marek; Noor; Oskar; Petra; Rahul; Sofia; Tomas; Ulrike; Viola; Wei;
    Yusuf; Zoe
goods: notebooks; pencils; mugs; candles; scarves; apples; oranges; muffins; posters; batteries; light bulbs;
    cushions; plates; spoons; T-shirts; puzzles; marbles; stamps; seed packets; water bottles; lemons; eggs; bagels;
    stickers; keyrings; socks; tennis balls; erasers; paint brushes; picture frames; tea boxes; flower pots; towels;
    tickets; gift cards; toy cars; bookmarks; magnets; ribbons; headphones
item: jacket; bicycle; lamp; backpack; tent; camera; desk; sofa; blender; guitar; watch; printer; suitcase; toaster;
    coat; mattress; telescope; keyboard; rug; heater; bookshelf; drill; monitor; vacuum cleaner; skateboard; violin;
    microscope; tablet; fan; mirror
shop: bakery; bookshop; hardware store; market stall; garden center; gift shop; toy store; school shop; farm shop;
    corner store; museum shop; online store; stationery shop; sports shop; grocery store
place: Oakville; Ridgeton; Maple Harbor; Stonebridge; Lakeview; Fernhill; Brightwater; Clayford; Eastmere; Northgate;
    Pinewood; Silverton; Westbrook; Sandy Point; Greenfield
vehicle: car; bus; train; cyclist; truck; motorcycle; delivery van; tram; coach; scooter
liquid: juice; salt water; paint; milk; vinegar; syrup; cleaning fluid; lemonade; fuel; iced tea
container: tank; bucket; barrel; pool; bathtub; pond; jug; aquarium; cistern; drum
task_work: paint a fence; clean a hall; pack an order; mow a park; build a wall; sort the mail; fill a pool; type a
    report; plant a field; assemble a shelf; wash the windows; print the tickets
metal: copper; silver; gold; tin; zinc; nickel
animal_pair: chickens and rabbits; ducks and goats; hens and cows; geese and sheep; pigeons and cats; turkeys and pigs
color: red; blue; green; yellow; white; black; purple; orange
sport: basketball; football; hockey; volleyball; handball; rugby
person_kind: students; nurses; drivers; runners; visitors; players; clerks; cooks; scouts; dancers; engineers; farmers
measure: heights in centimeters; test scores; waiting times in minutes; daily sales; temperatures in degrees; weights
    in kilograms; page counts; commute times in minutes; ages; rainfall totals in millimeters
word: LEVEL; BANANA; PLANET; LETTER; SUCCESS; ORANGE; COMMITTEE; WINDOW; PEPPER; BALLOON; GARDEN; COFFEE; MIRROR;
    TOMORROW; ENGINE; SCHOOL; KITTEN; PUZZLE; MARBLE; RABBIT; CHEESE; LADDER; SUMMER; BUTTON; POCKET
concept: the difference between mean and median; what a prime number is; why division by zero is undefined; what a
    derivative measures; the Pythagorean theorem; how to add fractions with different denominators; what a percentage
    is; what a logarithm is; the meaning of standard deviation; what a function is; how long division works; what
    negative exponents mean; why the angles of a triangle add to 180 degrees; what an irrational number is; the
    distributive law; what slope means for a line; how compound interest works; what a permutation is; what a
    combination is; conditional probability; the order of operations; what pi is; how to find a least common multiple;
    what an absolute value is; what a square root is; scientific notation; what a ratio is; how a weighted average
    works; what a limit is; what an integral measures; what a vector is; what a matrix is; how rounding works; what a
    variable is; why a negative times a negative is positive; modular arithmetic; binary numbers; what a geometric
    sequence is; what an arithmetic sequence is; what correlation means; the difference between area and perimeter;
    what an inequality is; how to convert a fraction to a decimal; what a factor is; what symmetry means in geometry;
    the quadratic formula; completing the square; what independent events are; the law of large numbers; expected
    value
audience: a ten-year-old; a high school student; an adult who forgot school math; a new teacher; a curious
    grandparent; a first-year college student; someone who is nervous about math; a carpenter; a small business owner;
    a student who likes pictures more than formulas
claim: the sum of two odd numbers is even; the product of two even numbers is a multiple of 4; the square of an odd
    number is odd; the sum of three consecutive integers is a multiple of 3; the square root of 2 is irrational; there
    are infinitely many primes; a number is divisible by 9 when its digit sum is; the sum of the first n odd numbers
    is n squared; the diagonals of a rectangle are equal; n squared plus n is always even; the sum of the first n
    integers is n(n+1)/2; the base angles of an isosceles triangle are equal; the product of two consecutive integers
    is even; the difference of two squares factors; a number with an odd count of divisors is a perfect square; the
    average of two numbers lies between them; five consecutive integers add to a multiple of 5; the exterior angle of
    a triangle is the sum of the two remote interior angles; if n squared is even then n is even; the sum of a
    rational and an irrational number is irrational; two to the power n is larger than n; a triangle in a semicircle
    is a right triangle; the sum of the squares of two odd numbers is never a multiple of 4; the graph of an even
    function is symmetric
proof_style: by direct argument; by contradiction; with algebra; with a picture in words; by induction if it helps; in
    at most five sentences; for a beginner; step by step
shape_solid: cube with a side of {2..25} {length_unit}; box of {2..25} by {2..25} by {2..25} {length_unit}; cylinder
    with a radius of {2..12} and a height of {3..30} {length_unit}; cone with a radius of {2..12} and a height of
    {3..30} {length_unit}; sphere with a radius of {2..25} {length_unit}; pyramid with a square base of {2..20}
    {length_unit1} and a height of {3..30} {length_unit1}
length_unit: centimeters; meters; inches; feet; millimeters; yards
currency: dollars; euros; pounds
month: January; February; March; April; May; June; July; August; September; October; November; December
weekday: Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday
drink: coffee; lemonade; apple juice; hot chocolate; iced tea; orange juice
dish: pancakes; soup; cookies; bread; curry; salad; pasta; muffins; stew; pizza
frac: 1/2; 1/3; 2/3; 1/4; 3/4; 2/5; 3/5; 5/6; 1/6; 3/8; 5/8; 7/8; 2/7; 4/7; 4/9; 5/9; 7/10; 3/10; 5/12; 7/12
convert: {2..90} kilometers to miles; {2..90} miles to kilometers; {3..200} pounds to kilograms; {3..200} kilograms to
    pounds; {-20..110} degrees Fahrenheit to Celsius; {-30..45} degrees Celsius to Fahrenheit; {2..40} gallons to
    liters; {2..500} hours to days; {100..9000/50} seconds to minutes; {2..60} feet to meters; {12..200} inches to
    centimeters; {2..90} square meters to square feet; {200..5000/100} milliliters to liters; {2..30} weeks to hours
angle: 30; 45; 60; 90; 120; 135; 150; 180
mistake: {=a+b+1}; {=a+b-10}; {=a*b}; {=a+b+10}; {=a+b}
"""

ENDINGS = r"""
show: Show each step.; Give only the final number.; Explain your reasoning in two or three sentences.; Write the
    equation first and then solve it.; Check your answer at the end.; Answer in one full sentence.; Explain it the way
    you would to {audience}.; List the known values, then the unknown, then the solution.; Put the final answer on its
    own line after the word "Answer:".; Also say which operation you used and why.; Round the result to one decimal
    place if needed.; Solve it in two different ways.; Finish with a similar practice problem.; Use a small table for
    your working.
calc: Show the working.; Give just the result.; Explain each rule that you use.; Verify the result by another method.;
    Answer as a short numbered list of steps.; Write the answer as "Result: ..." and nothing else.; Point out the
    mistake that students often make here.; Explain it to {audience}.
tell: Use an everyday example.; Keep it under five sentences.; Use a numbered example with real figures.; End with one
    question to test understanding.; Avoid technical words.; Use bullet points.; Mention one common mistake.; Start
    with a one-line summary.
"""

TEMPLATES = r"""
buy-total @show: {name1} buys {2..15} {goods} at ${2..12} each and {2..9} {goods} at ${1..9} each. How much does
    {name1} owe in total if the {shop} adds no tax?
change @show: At the {shop}, {name1} picks {3..12} {goods} that cost ${2..8} each and pays with a ${100..200/50} bill.
    How much change should {name1} get back?
discount @show: A(n) {item} costs ${40..480/5}. It is on sale for {5..60/5}% off. What is the sale price?
discount-twice @show: The price of a(n) {item} of ${60..400/10} is cut by {10..40/5}% and a week later by another
    {5..30/5}%. What does it cost now?
markup @show: A(n) {shop} buys a(n) {item} for ${20..300/5} and sells it with a markup of {10..80/5}%. Find the
    selling
    price and the profit.
reverse-percent @show: After a {10..50/10}% discount, a(n) {item} sells for ${36..360/9}. What was the original price?
tax-tip @show: A dinner for {2..8} people costs ${40..240/4} before tax. Tax is {5..10}% and the group leaves a
    {10..25/5}% tip on the price before tax. How much does each person pay?
best-deal @show: Which is the better deal: {3..8} {goods1} for ${6..24} or {9..20} {goods1} for ${20..60}?
budget @show: {name1} earns ${1200..4800/100} a month, spends {20..45/5}% on rent and {10..25/5}% on food, and saves
    half of the rest. How much does {name1} save in a year?
coins @show: {name1} has {10..40} coins, all nickels and dimes, worth ${1..3}.{10..90/10} in total. How many of each
    could {name1} have? If it is not possible, say why.
speed-time @show: A(n) {vehicle} leaves {place} at {20..90/5} kilometers per hour. How long does it take to reach
    {place}, {30..480/10} kilometers away?
speed-average @show: A(n) {vehicle1} drives {20..200/10} kilometers at {30..60/5} km/h and then {20..200/10}
    kilometers
    at {65..110/5} km/h. What is the average speed for the whole trip?
meet @show: Two towns are {100..600/10} kilometers apart. A(n) {vehicle} starts in {place} at {30..60/5} km/h and a(n)
    {vehicle} starts in the other town at the same moment at {40..90/5} km/h, toward each other. After how many hours
    do they meet?
catch-up @show: {name1} leaves home walking at {3..5} km/h. {10..40/5} minutes later, {name2} follows by bike at
    {12..20} km/h. How far from home does {name2} catch up?
boat @show: A boat goes {12..60/2} kilometers upstream in {3..6} hours and the same way downstream in 2 hours. Find
    the speed of the boat in still water and the speed of the current.
mixture @show: How many liters of {5..20/5}% {liquid1} must be mixed with {5..30/5} liters of {40..80/5}% {liquid1} to
    get a mixture of {25..35/5}%?
dilute @show: A(n) {container} holds {10..90/5} liters of {liquid} with a concentration of {20..60/5}%. How much water
    should be added to bring it down to {5..18}%?
alloy @show: A jeweler melts {20..90/5} grams of an alloy with {30..60/5}% {metal1} together with {20..90/5} grams of
    another with {65..90/5}% {metal1}. What percentage of {metal1} does the result have?
coffee-blend @show: A shop blends tea at ${4..9} a kilo with tea at ${11..20} a kilo to make {10..60/5} kilos worth
    $10 a kilo. How much of each does it need?
ages-now @show: {Y:3..12}{name1} is {a:3..6} times as old as {name2}. In {=a*y-2*y} years, {name1} will be twice as
    old as
    {name2}. How old are they now?
ages-sum @show: The ages of {name1}, {name2} and {name3} add up to {45..120/3}. {name2} is {2..9} years older than
    {name1}, and {name3} is twice as old as {name1}. How old is each of them?
ages-past @show: {5..12} years ago, {name1} was half as old as {name2}. Today the sum of their ages is {40..90/2}.
    Find both ages.
work-two @show: {name} can {task_work1} in {2..12} hours and {name} can do it in {3..15} hours. How long do they need
    together?
work-workers @show: If {3..12} workers {task_work} in {4..20} days, how many days would {5..24} workers need at the
    same pace?
pipes @show: One pipe fills a(n) {container1} in {2..9} hours, a second pipe fills it in {4..12} hours, and a drain
    empties it in {13..30} hours. All three are open. When is the {container1} full?
machine-rate @show: A machine makes {120..900/20} {goods1} in {2..8} hours. How many {goods1} does it make in {9..40}
    hours, and how long does it need for {1000..5000/500}?
rect-area @show: A rectangular garden is {5..40} meters long and {3..30} meters wide. Find its area and the length of
    fence needed to go around it.
rect-unknown @show: The perimeter of a rectangle is {40..160/4} {length_unit1} and its length is {2..9} {length_unit1}
    more than its width. What are the length and the width?
path-around @show: A pool of {8..25} by {4..12} meters has a path {2..4} meters wide all around it. What is the area
    of the path?
tiles @show: How many square tiles with a side of {10..50/5} centimeters cover a floor of {2..9} by {3..12} meters,
    and what do they cost at ${1..6} each?
circle @show: A round {container} has a radius of {2..30} {length_unit1}. Find the circumference and the area of its
    opening.
pizza @show: Is one pizza with a diameter of {35..50} centimeters for ${14..24} a better value than two pizzas with a
    diameter of {20..30} centimeters for ${6..11} each?
triangle-right @calc: In a right triangle the legs are {3..24} and {4..40} {length_unit}. Find the hypotenuse, the
    area and the perimeter.
ladder @show: A ladder of {4..15} meters leans on a wall with its foot {2..3} meters from the wall. How high does it
    reach?
volume @calc: Work out the volume of a(n) {shape_solid}, and say which formula you use.
box-water @show: A fish tank is {30..120/5} cm long, {20..60/5} cm wide and {20..60/5} cm high. It is filled to {frac}
    of its height. How many liters of water are in it?
angle-triangle @calc: Two angles of a triangle are {25..80} and {30..85} degrees. What is the third angle, and what
    kind of triangle is it?
polygon @calc: Find the sum of the interior angles of a polygon with {5..30} sides and the size of one angle if it is
    regular.
sector @calc: Find the area and the arc length of a circle sector with radius {3..30} and an angle of {angle} degrees.
similar @show: A tree casts a shadow of {4..25} meters while a stick of {1..2} meters casts a shadow of {2..5} meters.
    How tall is the tree?
map-scale @show: On a map with a scale of 1 to {10000..200000/5000}, {place} and {place} are {2..30} centimeters
    apart. What is the real distance in kilometers?
scale-recipe @show: A recipe for {2..6} people needs {100..500/50} grams of flour, {2..6} eggs and {50..300/25}
    milliliters of milk. What is needed to make {dish} for {7..20} people?
simple-interest @show: {name1} puts ${500..9000/100} in an account with {1..9}% simple interest a year. How much is in
    it after {2..15} years?
compound-interest @show: How much is an investment of ${500..9000/100} worth after {2..12} years at {2..9}% interest
    compounded every year?
loan @show: {name1} borrows ${1000..9000/500} at {3..12}% simple interest a year for {1..5} years and pays it back in
    equal monthly amounts. How large is each payment?
double-time @show: About how many years does it take money to double at {2..12}% interest a year? Use the rule of 72
    and then say how exact it is for ${100..900/100}.
depreciation @show: A(n) {item} bought for ${300..3000/50} loses {10..30/5}% of its value every year. What is it worth
    after {2..6} years?
percent-of @calc: What is {3..97}% of {40..2000/20}, and what percentage is {5..39} of {40..400/10}?
percent-change @show: The number of visitors to {place} rose from {200..900/10} to {910..2400/10}. What is the
    percentage increase?
population @show: The town of {place} has {2000..90000/1000} people and grows by {1..6}% a year. Estimate how many
    people live there after {2..5} years.
dice @show: You roll {2..4} fair dice. What is the probability that {the sum is at least|the sum is exactly|the
    largest number minus the smallest is less than} {3..12}?
marbles @show: A bag has {2..12} {color} marbles, {2..12} {color} marbles and {2..9} {color} ones. You draw two
    without putting the first back. What is the probability that they have the same color?
coin-flips @show: A fair coin is flipped {3..10} times. What is the probability of {exactly|at least|at most} {1..3}
    heads?
cards @calc: You draw {2..6} cards from a deck of 52 cards, {one after the other|all at once}, without putting any
    back. What is the chance that {every|at least one|no} card is {a heart|a red card|a face card|an ace|a club|a
    black card|a queen}?
spinner @show: A spinner has {4..12} equal sections and {2..3} of them win a prize. {name1} spins {2..6} times. What
    is the chance of at least one win?
expected-game @show: A game costs ${1..5} to play. With a chance of 1 in {4..20} you win ${10..60/5}, otherwise
    nothing. Is it worth playing in the long run?
arrange @calc: In how many different ways can the letters of the word {word} be arranged if {there is no other
    rule|the first letter must stay in place|the last letter must stay in place|the vowels stay together}?
committee @show: From {5..14} {person_kind} and {4..12} {person_kind}, a group of {3..6} is chosen with at least one
    of each kind. How many groups are possible?
outfits @show: {name1} packs {3..9} shirts, {2..6} pairs of pants and {2..5} hats. How many different outfits are
    possible, and how many days pass before one must be repeated?
handshakes @show: At a meeting of {8..60} {person_kind}, everyone shakes hands once with everyone else. How many
    handshakes are there?
passwords @calc: How many codes with {3..8} characters are there if each is {a digit|a lowercase letter|a letter or a
    digit|a vowel} and {repeats are allowed|no character may repeat}?
seating @show: {name}, {name}, {name1}, {name2} and {1..4} more friends sit in a row. In how many ways can they sit if
    {name1} and {name2} {want to sit|refuse to sit} next to each other?
arith-seq @calc: An arithmetic sequence starts with {-20..30} and has a common difference of {2..15}. Find term number
    {10..99} and the sum of the first {10..60} terms.
geo-seq @calc: Find term number {5..10} of the geometric sequence that starts {a:1..9}, {=a*3}, {=a*9}, and the sum of
    the first {4..8} terms.
next-terms @calc: Continue the sequence {a:1..30}, {=a+3}, {=a+8}, {=a+15}, {=a+24} by {2..5} terms and describe the
    rule.
next-linear @calc: What are the next three numbers after {a:5..60}, {=a+7}, {=a+14}, {=a+21}? Write a formula for term
    n and use it for n = {20..90}.
stairs-pattern @show: A pattern of tiles has {a:2..9} tiles in step 1, {=a+4} in step 2 and {=a+8} in step 3. How many
    tiles are in step {12..60}?
theater @show: A theater has {14..40} rows. The first row has {10..30} seats and every row has {1..4} more than the
    one before. How many seats are there in all?
mean-missing @show: The mean of {4..7} {measure} is {20..80}. All but one of them add up to {70..180}. What is the
    missing value?
data-summary @calc: Find the mean, the median, the mode and the range of these {measure}: {2..60}, {2..60}, {2..60},
    {2..60}, {2..60}, {2..60}, {2..60}.
weighted-grade @show: {name1} has {60..98} on homework (weight {20..40/10}%), {50..98} on the midterm (weight 30%) and
    the final counts for the rest. What score on the final gives {name1} a grade of {70..90/5}?
average-speed-table @show: Make a table with the columns day, distance and running total for a hiker who walks {8..25}
    km on the first day and {2..4} km more on each following day, for {4..7} days.
outlier @calc: One of these {measure} looks wrong: {20..30}, {20..30}, {20..30}, {200..300}, {20..30}. Show how the
    mean and the median change when it is left out.
linear-eq @calc: Solve for x: {2..15}x {+|-} {1..60} = {2..99}.
linear-both @calc: Solve the equation {a:5..15}x - {1..30} = {2..4}x + {1..60} and check the solution.
linear-paren @calc: Find x if {2..9}(x {+|-} {1..12}) = {1..9}x + {10..70}, where x is a real number.
frac-eq @calc: Solve x/{2..9} + x/{3..12} = {4..40} and write the answer as a fraction in lowest terms.
system-two @calc: Solve this system of two equations: {2..9}x + {2..9}y = {10..80} and x - {1..6}y = {-10..20}.
quad-factor @calc: {A:2..12}{B:1..12}Factor the expression x^2 + {=a+b}x + {=a*b} completely and list its zeros.
quad-solve @calc: Solve the quadratic equation {1..5}x^2 {+|-} {2..20}x - {1..40} = 0 with the quadratic formula.
inequality @calc: Solve the inequality {2..12}x - {1..40} {<|>|<=|>=} {5..90} and describe the solution on a number
    line.
simplify @calc: Simplify the expression {2..9}({2..7}x - {1..9}) - {2..9}(x {+|-} {1..9}) as far as possible.
expand @calc: Expand and simplify ({1..6}x + {1..12})({1..6}x - {1..12}), then name the rule that you used.
evaluate @calc: Evaluate the expression {2..9}a^2 - {2..9}ab + {1..20} for a = {-6..9} and b = {-6..9}.
order-ops @calc: Work out {2..40} + {2..12} * ({3..20} - {1..9}) / {2..5} and explain the order of operations.
exponents @calc: Write {2..7}^{2..6} * {2..7}^{2..5} as a single number and explain which exponent rules apply.
log-solve @calc: Solve {2..9}^x = {10..900} for x with logarithms and give two decimals.
frac-add @calc: Add {frac} and {frac}, subtract {frac} from the sum, and reduce the result.
frac-mul @calc: Compute {frac} times {frac} divided by {frac} and give the result as a mixed number if it is larger
    than one.
frac-order @calc: Put these fractions in order from smallest to largest: {frac}, {frac}, {frac} and {frac}.
decimal-frac @calc: Write 0.{101..989} as a fraction in lowest terms and {frac} as a decimal and a percentage.
gcd-lcm @calc: Find the greatest common divisor and the least common multiple of {12..240/2} and {18..360/3}.
prime-factor @calc: Give the prime factorization of {60..2000} and say how many divisors it has.
divisible @calc: Without a calculator, decide whether {1000..99999} is divisible by {3|4|6|8|9|11|12} and explain the
    test.
modular @calc: What is the remainder when {2..9}^{10..60} is divided by {5..13}?
base-change @calc: Convert the number {17..900} from base ten to base {2|3|5|8|16}, and then back again to check.
long-multiply @calc: Multiply {112..989} by {12..98} by hand, writing every partial product on a line of its own.
long-divide @calc: Divide {1000..9999} by {11..48} with long division. State the quotient and the remainder.
estimate @calc: Estimate {211..989} times {18..97} by rounding, then compute the exact product and compare.
round-numbers @calc: Round {1000..99999}.{11..99} to the nearest ten, the nearest hundred and the nearest thousand.
scientific @calc: Write {1200..98000/100} and 0.000{12..98} in scientific notation and multiply them.
unit-convert @calc: Convert {convert}. State the conversion factor that you use.
units-two @calc: Please convert {convert}, and also {convert}, in a table with the columns from, to and result.
time-add @show: A film starts at {1..9}:{10..55/5} in the afternoon and lasts {95..190} minutes with a break of
    {10..20/5} minutes. When does it end?
calendar @show: If {month} {1..28} is a(n) {weekday}, which day of the week is it {30..400} days later?
sum-to-n @calc: Find the sum of all {whole numbers|even numbers|odd numbers|multiples of 3|multiples of 7} from
    {1..40} to {60..500/10}.
number-riddle @show: I think of a number, multiply it by {2..9}, add {3..40}, and get {50..200}. What was my number?
digits @show: A two-digit number has a digit sum of {5..15}. Swapping its digits makes it larger by {9..54/9}. Which
    number is it?
consecutive @show: {Three|Four|Five} consecutive {numbers|even numbers|odd numbers} add up to {60..300/3}. Find them,
    or explain why there are none.
heads-legs @show: {X:4..40}{Y:3..40}A farm has {animal_pair1} with {=x+y} heads and {=2*x+4*y} legs in all. How many
    of each kind of
    animal are there?
tickets-sold @show: For a(n) {sport} match, {150..900/10} tickets were sold: adults paid ${8..20} and children
    ${3..7}.
    The total was ${2000..6000/100}. How many children came?
phone-plans @show: Plan A costs ${10..30} a month plus {2..9} cents a minute, plan B costs ${35..60} with everything
    included. From how many minutes on is plan B cheaper?
taxi @show: A taxi charges ${2..6} at the start and ${1..4} per kilometer. How far can {name1} ride with ${20..80/5}?
share-ratio @show: {name}, {name} and {name} share ${60..900/30} in the ratio {1..4} to {2..5} to {3..7}. How much
    does each of them get?
ratio-mix @show: To make {color} paint, {1..4} parts of {color} are mixed with {3..7} parts of {color}. How much of
    each is in {10..90/5} liters?
proportion @show: {3..9} {goods1} weigh {200..900/20} grams. What do {10..40} {goods1} weigh, and how many weigh
    {5..12} kilograms?
derivative @calc: Find the derivative of f(x) = {2..9}x^{3..6} - {2..12}x^2 + {1..30}x and its value at x = {-3..5}.
max-area @show: A farmer has {40..400/4} meters of fence for a rectangular field along a straight river, where no
    fence is needed. Which dimensions give the largest area?
integral @calc: Compute the integral of {2..12}x^{1..4} + {1..20} from x = {0..2} to x = {3..8}.
line-points @calc: Find the equation of the line through ({-8..3}, {-9..9}) and ({4..12}, {-9..9}), its slope and
    where it crosses the y axis.
distance-points @calc: What are the distance and the midpoint between the points ({-12..12}, {-12..12}) and
    ({-12..12}, {13..24})?
parabola @calc: For the parabola y = x^2 - {2..16/2}x + {1..30}, find the vertex and the axis, and say whether it
    crosses the x axis.
trig-height @show: From {10..80} meters away, the top of a tower is seen at an angle of {20..70/5} degrees above the
    ground. How tall is the tower?
matrix @calc: Multiply the matrix with rows ({-4..6}, {-4..6}) and ({-4..6}, {-4..6}) by the vector ({-5..9},
    {-5..9}).
sets @show: Of {90..160} {person_kind1}, {30..50} like {drink}, {20..45} like {drink} and {5..18} like both. How many
    like neither?
explain @tell: Explain {concept} to {audience}.
explain-why @tell: A student writes: "Please explain {concept}." Write a friendly answer of about {60..150/10} words
    with one
    example for {audience}.
analogy @tell: Find a good analogy for {concept} from {cooking|sports|money|music|gardening|travel} and explain where
    it breaks down.
quiz-make: Write {3..6} quiz questions about {concept} for {audience}, from easy to hard, with an answer key.
lesson: Outline a {15..45/5} minute lesson on {concept} for {audience}: goal, warm-up, main activity and closing
    question.
prove: Prove {proof_style} that {claim}.
prove-check: A student claims that {claim}. Test the claim with {2..4} examples and then prove it {proof_style}.
claim-true: Is it always true that {claim}? Answer yes or no first, then justify it {proof_style}.
check-sum: A student wrote: "{a:120..980} + {b:120..980} = {mistake}." Check this sum and, if it is wrong, explain the
    likely mistake.
check-eq: {C:2..12}Check this solution: "{a:2..9}x + {b:3..30} = {=a*c+b}, so x = {c} after subtracting {b} and
    dividing
    by {a}." Is every step right?
check-eq-wrong: {C:2..12}A student solved {a:2..9}x - {b:3..30} = {=a*c-b} and got x = {=c+b}. Find the wrong step and
    give the right answer.
check-percent: {name1} says that raising a price of ${100..500/20} by {10..40/5}% and then lowering it by the same
    percentage brings it back. Find the error in this reasoning.
check-average: {name1} drove to {place} at {40..60/5} km/h and back at {70..100/5} km/h, and claims the average speed
    is the mean of the two. Is {name1} right?
choice-arith: Choose the correct answer. What is {a:12..98} times {b:3..9}? A) {=a*b} B) {=a*b+10} C) {=a*b-b} D)
    {=a*b+b}. Explain why the others are wrong.
choice-percent: Multiple choice: {a:10..90/10}% of {b:100..900/100} is A) {=a*b//100+5} B) {=a*b//10} C) {=a*b//100}
    D)
    {=b-a}. Pick one letter and show the calculation.
choice-area: Which is the area of a rectangle with sides {a:4..30} and {b:3..20}? A) {=2*a+2*b} B) {=a+b} C) {=a*b} D)
    {=a*b*2}. Give the letter and one reason.
fill-table: Fill in a table of values for y = {2..9}x {+|-} {1..20} with x from {-4..0} to {2..5}, and describe the
    graph.
table-savings: Make a table that shows how ${200..2000/100} grows at {2..10}% interest a year over {3..6} years, with
    one row a year.
table-sales @calc: A(n) {shop} sold {20..90} {goods} in {month}, {20..90} in the next month and {20..90} in the month
    after. Make a table with the change from month to month in percent.
write-problem: Write a word problem for {audience} whose answer is {6..250} and that involves {goods}, a(n) {item} and
    a(n)
    {vehicle}. Then solve it.
story-to-eq: Turn this into an equation without solving it: {name1} has {3..40} more {goods1} than {name2}, and
    together they have {50..150}.
eq-to-story: Make up a short story about {name} and {goods} that fits the equation {2..9}x + {3..30} = {40..120}, and
    then find x.
compare-methods: Compare two ways to compute {12..49} times {12..49} in your head and say which one is faster for
    {audience}.
mental-trick @tell: Describe a mental math trick for {multiplying by 11|squaring numbers that end in 5|multiplying by
    25|adding long lists of numbers|taking 15 percent|dividing by 5} and use it on {12..95} and {12..95}.
real-life @tell: Give {3..6} situations from daily life in which {audience} would need {concept}.
history-math @tell: Someone wants to know {concept}. Tell a little about the history of this idea and its use, in
    about {50..120/10} words.
game-strategy @show: Two players take turns to remove 1 to {2..5} {goods} from a pile of {12..40}. Who takes the last
    one wins. Does the first player have a winning plan?
clock-angle @show: What is the angle between the hands of a clock at {1..12}:{10..55/5}?
grid-paths @calc: How many shortest paths lead from one corner of a {3..8} by {3..8} grid to the opposite corner if
    you only move right or up?
pages @show: {name1} reads {12..40} pages a day of a book with {200..800/10} pages. {name2} starts {2..6} days later
    and reads {41..70} pages a day. Who finishes first?
stack-height @show: A stack of {100..500/50} sheets of paper is {1..5} centimeters high. How many sheets are in a
    stack as high as {2..5} meters?
water-bill @show: The water bill is ${5..15} plus ${1..4} for each cubic meter up to {10..20}, and ${5..7} for each
    one above that. What does a family pay for {12..45} cubic meters?
shift-pay @show: {name1} earns ${11..28} an hour and one and a half times as much after {35..40} hours in a week. What
    is the pay for {41..55} hours?
"""
