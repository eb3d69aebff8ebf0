"""Chat prompts: templates, endings and word lists (`dsim.drafter.prompts` says what the slots mean)."""

from __future__ import annotations

TABLES = r"""
topic: public libraries; electric cars; remote work; urban gardening; tea; chess; space telescopes; coral reefs;
    bicycles; school uniforms; sleep; board games; volcanoes; honey bees; public transport; jazz; photography;
    recycling; solar power; camping; cats; dogs; bread; languages; museums; marathons; video games; handwriting;
    podcasts; yoga; glaciers; robots; cheese; chocolate; wind turbines; city parks; knitting; whales; origami;
    fireworks; trains; lighthouses; deserts; maps; tidal power; football; social media; online shopping; breakfast;
    meditation; street art; seed banks; thunderstorms; zoos; aquariums; rainforests; swimming; dictionaries;
    calendars; clocks; bridges; castles; pyramids; the Olympic Games; the printing press; vaccines; antibiotics;
    satellites; the internet; newspapers; radio; cinema; opera; ballet; folk music; comic books; poetry; fairy tales;
    detective novels; science fiction; pottery; glass making; woodworking; beekeeping; bird watching; mushrooms; wild
    flowers; oak trees; penguins; owls; sharks; elephants; dinosaurs; fossils; earthquakes; rainbows; eclipses; the
    Moon; Mars; black holes; comets; gravity; magnets; batteries; plastic; paper; cotton; steel; salt; coffee; olive
    oil; rice; potatoes; soup; ice cream; spices; street food; vegetarian food; farmers' markets; second-hand clothes;
    minimalism; tiny houses; cohousing; volunteering; charity shops; homework; exams; group projects; field trips;
    summer jobs; internships; public speaking; job interviews; teamwork; leadership; negotiation; budgeting; saving
    money; credit cards; insurance; taxes; inflation; free trade; small businesses; tourism; backpacking; road trips;
    cruise ships; night trains; hostels; national parks; mountain huts; skiing; surfing; sailing; climbing; hiking;
    gymnastics; tennis; table tennis; martial arts; dancing; karaoke; choirs; family dinners; birthdays; weddings;
    moving house; house plants; indoor air; noise in cities; light pollution; clean water; soil; insects; birds in
    winter
person: a new colleague; a neighbor; my landlord; an old friend; my manager; my grandmother; a teacher; a customer;
    the city council; a hotel; my team; a local newspaper; my cousin; the school office; a former classmate; a
    charity; my doctor's office; a potential client; the librarian; my roommate; a shop owner; my aunt; the building
    manager; a coach
mail_goal: to ask for a deadline extension; to say thank you for a gift; to complain about noise; to apologize for a
    missed meeting; to invite them to a picnic; to ask for a recommendation; to cancel an order; to propose a time to
    meet; to report a broken heater; to congratulate them on a new job; to decline an invitation; to ask for a refund;
    to introduce myself; to share good news; to request a day off; to ask for feedback; to offer help with a move; to
    remind them of an unpaid bill; to ask for directions; to suggest a book club; to welcome them; to ask about
    opening hours; to resign politely; to request a quieter room
tone: friendly; formal; cheerful; calm; polite but firm; warm; humorous; confident; apologetic; businesslike;
    enthusiastic; gentle
persona: ship's captain; lighthouse keeper; museum guide; chess coach; medieval baker; space pilot; weather reporter;
    gardener; librarian; detective; travel agent; nutritionist; primary school teacher; mountain guide; wise old
    turtle; robot butler; sports commentator; Victorian inventor; park ranger; tailor; pirate cook; night train
    conductor; beekeeper; stage magician; clockmaker; village mayor; zookeeper; marine biologist; potter; street
    musician
hero: a shy dragon; a lost robot; a retired postman; two sisters; a talking crow; a young baker; a lonely lighthouse
    keeper; a brave snail; an honest thief; a forgetful wizard; a clever fox; a boy who collects sounds; a cat in a
    library; a tired king; a cloud that fears heights; a girl who repairs clocks; an old fisherman; a nervous
    astronaut; a tiny elephant; a street painter; a curious goat; a night nurse; a bus driver; a snowman in spring; a
    map maker; a violin teacher; a firefly; a beginner detective; a mail pigeon; a ghost who likes tea
quest: must return a borrowed key; finds a letter without a name; wants to win a cooking contest; gets stuck in an
    elevator; has to cross a frozen river; discovers a hidden garden; tries to make a new friend; loses a very
    important hat; hears music from an empty house; plants a strange seed; is invited to the wrong party; must tell
    the truth for one day; finds a door in a tree; has to deliver a cake in the rain; forgets a promise; wakes up in a
    painting; trades places with a shadow; learns to whistle; saves a small bridge; misses the last train
setting: in a small harbor town; on a space station; in a desert village; during a snowstorm; in a busy market; on a
    quiet island; in a city of glass; at the edge of a forest; on a night train; in an old theater; at a school for
    inventors; under the sea; in a mountain hut; on a rooftop garden; in a museum after closing time; on a very long
    bridge
place_city: Lisbon; Kyoto; Oslo; Marrakesh; Buenos Aires; Hanoi; Edinburgh; Cape Town; Vienna; Montreal; Istanbul;
    Seoul; Prague; Lima; Copenhagen; Athens; Melbourne; Chicago; Naples; Tallinn; Havana; Singapore; Dublin; Krakow;
    Mexico City; Helsinki; Florence; Bangkok; Zurich; Reykjavik; Valencia; Porto
ingredient: chickpeas; rice; spinach; eggs; tomatoes; potatoes; mushrooms; tofu; carrots; lentils; pasta; zucchini;
    salmon; chicken; black beans; cauliflower; oats; apples; feta; sweet potatoes; bell peppers; leeks; coconut milk;
    pumpkin; yogurt; bananas; cabbage; corn; eggplant; peas
meal: weeknight dinner; packed lunch; picnic; birthday brunch; light supper; camping breakfast; snack for children;
    dinner for two; soup for a cold day; salad for a party
diet: vegetarian; vegan; gluten-free; dairy-free; low-salt; high-protein; nut-free; budget
thing: umbrella; notebook; water bottle; desk lamp; backpack; alarm clock; tea kettle; bicycle bell; pair of wool
    socks; garden hose; wooden chair; scented candle; travel pillow; kitchen knife; sun hat; picture book; puzzle;
    yoga mat; phone case; picnic blanket; coffee grinder; bird feeder; rain jacket; board game; toolbox; hammock;
    headlamp; lunch box; plant pot; guitar strap
buyer: students; new parents; hikers; commuters; retired people; office workers; gardeners; teenagers; travelers; home
    cooks; cyclists; musicians
job: nurse; bus driver; librarian; web designer; chef; teacher; accountant; electrician; photographer; sales
    assistant; project manager; receptionist; translator; gardener; journalist; data analyst; carpenter; pharmacist;
    tour guide; hotel manager; firefighter; veterinarian; baker; social worker
trouble: I keep putting off my work; I cannot fall asleep at night; my roommate never cleans; I feel nervous before
    presentations; I forget people's names; I spend too much money on snacks; I argue with my brother about small
    things; I moved to a new city and know nobody; my meetings take too long; I want to read more but never do; my
    plants keep dying; I check my phone all the time; I cannot say no to extra tasks; my desk is always a mess; I get
    bored when I exercise; I am learning a language and lost my motivation; my teenager does not talk to me; I am
    always ten minutes late; I do not know what to cook; I find it hard to make decisions; I work from home and feel
    lonely; I failed an exam; my friend did not repay a loan; I have too many hobbies
goal: run five kilometers; learn to cook; save for a trip; read twenty books a year; learn basic Spanish; grow
    vegetables on a balcony; write a short novel; get up earlier; drink more water; learn to play the ukulele; pass a
    driving test; start a small online shop; declutter the house; learn to swim; make new friends; improve my
    handwriting; prepare for a job interview; draw better portraits; give a good speech; spend less time online; learn
    to knit; train a puppy; repair a bicycle; organize a reunion
compare_pair: tea and coffee; trains and planes; cats and dogs; renting and buying a home; paper books and e-books;
    city life and country life; gas and electric stoves; running and swimming; phone calls and text messages; cash and
    cards; summer and winter vacations; big and small companies; cooking at home and eating out; learning alone and in
    a group; lakes and oceans; wood and metal furniture; weather and climate; frogs and toads; comets and asteroids;
    alligators and crocodiles; jazz and blues; novels and short stories; democracy and monarchy; rivers and canals;
    butter and olive oil; working from home and in an office; film and digital photography; public and private
    schools; marathons and sprints; violins and cellos; mushrooms and plants; credit and debit; watercolor and oil
    paint; bees and wasps; planets and stars
history: the invention of the printing press; the fall of the Berlin Wall; the building of the Suez Canal; the Silk
    Road; the Great Fire of London; the first Moon landing; the French Revolution; the Black Death; the voyages of
    Magellan; the Industrial Revolution; the Roman roads; ancient Egyptian writing; the Viking voyages; the Ming
    dynasty; the Inca road system; the Renaissance in Florence; the first steam trains; the women's suffrage movement;
    the discovery of penicillin; the Great Depression; the Ottoman Empire; the history of chess; the library of
    Alexandria; the Meiji period in Japan; the gold rush in California; the Hanseatic League; the invention of the
    telephone; the Mali Empire; the eruption of Vesuvius; the founding of the United Nations
science: why the sky is blue; how vaccines work; why leaves change color; how tides form; why ice floats; how rainbows
    form; how the heart pumps blood; why we dream; how plants make food; how airplanes stay in the air; why the
    seasons change; how magnets work; how earthquakes happen; what DNA does; how soap cleans; why onions make us cry;
    how batteries store energy; how bats find their way; why the sea is salty; how glass is made; how the Moon affects
    the ocean; what causes thunder; how yeast makes bread rise; how fish breathe; why metals rust; how echoes work;
    how stars are born; how memory works; why some animals hibernate; how a compass works; how microwaves heat food;
    what a black hole is; how muscles grow; how rockets work in space; how clouds form; why popcorn pops
term: inflation; photosynthesis; irony; empathy; gravity; a metaphor; compound interest; evolution; democracy; an
    ecosystem; a hypothesis; a placebo; supply and demand; a mortgage; a sonnet; biodiversity; a time zone; satire; a
    patent; osmosis; a constitution; friction; an algorithm; a dialect; a budget deficit; nostalgia; a monopoly;
    carbon dioxide; opportunity cost; procrastination; a glacier; an alibi; a paradox; a habitat; the placebo effect;
    diplomacy; a renaissance; perspective in art; rhythm in music; culture shock
sentence: I am very happy about the result of the project.; The train to the city leaves at half past seven.; We would
    like to book a table for four people.; Please send me the documents before Friday.; The weather was so bad that we
    stayed at home.; Could you tell me where the nearest pharmacy is?; My sister lives near the sea and works in a
    school.; I forgot my keys in the office yesterday.; The children are playing in the garden behind the house.;
    Nobody expected the small team to win the game.; This soup needs a little more salt and some lemon.; The meeting
    has been moved to next Tuesday.; Thank you for helping us carry the boxes.; There is a problem with the heating in
    our room.; He always reads the newspaper before breakfast.; They decided to walk because the bus was late.; She
    has been learning to paint for two years.; The book was better than I had hoped.
language: French; Spanish; German; Italian; Portuguese; Dutch; Swedish; Polish
rough: gimme the report asap, its late again; we was thinking maybe you could of come to the meeting; the thing is
    broke and i want my money back now; sorry cant make it today, stuff came up; your product is kind of okay but
    shipping took forever; me and him finished the work so can we go; i dont get why this costs so much, explain; the
    party was good, the food was good, the music was good; in my opinion i think that we should maybe possibly wait;
    due to the fact that it rained, the event was not able to be held; hey boss, i need friday off, thanks; the new
    rule is dumb and nobody likes it; at this point in time we are currently unable to reply; he goes to store
    yesterday and buyed milk
who_sum: The town council; A group of students; The local museum; A small bakery; The hospital; A family of farmers;
    The train company; The school board; A team of engineers; The city library; A youth orchestra; The fishing village
did_sum: opened a new center near the river; planted more than two hundred trees; changed its opening hours; started a
    project to collect old phones; asked citizens for ideas; repaired a bridge that had been closed for years; tested
    a new way to save water; invited visitors to a free open day; collected money for a new roof; built a small
    workshop for repairs
why_sum: The aim was to bring people of all ages together.; Costs had risen for three years in a row.; Many residents
    had complained about the old situation.; A similar plan had worked well in a nearby town.; The idea came from a
    letter in the newspaper.; An expert had warned that waiting would be expensive.; The old building was no longer
    safe.
but_sum: Not everyone was pleased, however, because parking became harder.; At first, very few people noticed the
    change.; Some critics said the money should go elsewhere.; Rain delayed the work by several weeks.; There were not
    enough volunteers on weekdays.; One neighbor even wrote a protest song.
end_sum: In the end, more than {200..900/50} people took part.; The results will be published next spring.; A second
    phase is planned for {May|June|September|October}.; The mayor called it a quiet success.; Organizers now hope for
    a small grant of {2..9},000 dollars.; A vote on the future of the plan will be held in {3..11} weeks.
paragraph: {who_sum} {did_sum} last {spring|summer|autumn|winter}. {why_sum} {but_sum} {end_sum}; Last
    {Monday|Friday|weekend|month}, as reported, the following happened. {who_sum} {did_sum}. {but_sum} {end_sum};
    {who_sum} {did_sum}, and soon others did the same. {why_sum} {end_sum}; {why_sum} That is why it came as no
    surprise when this was announced. {who_sum} {did_sum}. {but_sum}
poem_kind: haiku; limerick; sonnet; rhyming couplet; free verse poem; short ballad; acrostic; lullaby; four-line poem;
    prose poem
event: birthday party for a six-year-old; retirement party; school reunion; street festival; housewarming; book club
    evening; charity run; office holiday party; garden wedding; movie night; neighborhood cleanup; science fair;
    farewell lunch; bake sale; game night; talent show
budget_size: a tiny budget; ${20..90/10}; ${100..900/50}; a normal household budget; almost no money
group: two adults; a family with small children; three friends; a solo traveler; a couple in their seventies; a school
    class; a group of colleagues; a family with a teenager
business: coffee cart; bike repair shop; plant nursery; language school; dog walking service; secondhand bookshop;
    soap workshop; bakery; escape room; cooking school; yoga studio; toy library; board game cafe; flower shop; film
    club; music school
animal: octopus; hedgehog; camel; owl; dolphin; penguin; bat; spider; wolf; giraffe; sea turtle; hummingbird; otter;
    crocodile; reindeer; salmon; kangaroo; ant; falcon; sloth
figure: Marie Curie; Leonardo da Vinci; Ada Lovelace; Galileo; Cleopatra; Mozart; Charles Darwin; Florence
    Nightingale; Isaac Newton; Frida Kahlo; Marco Polo; Johannes Gutenberg; Rosa Parks; Nikola Tesla; Socrates; Jane
    Austen; Confucius; Amelia Earhart; Beethoven; Louis Pasteur
quality: patience; curiosity; honesty; courage; kindness; humor; discipline; creativity; gratitude; persistence;
    modesty; trust
season: spring; summer; autumn; winter
adult_kid: a five-year-old; a ten-year-old; a teenager; a busy adult; a beginner; an expert from another field; a
    tourist; my grandfather
feeling: happy; tired; hopeful; nervous; proud; bored; curious; homesick; relaxed; excited
"""

ENDINGS = r"""
form: Keep it under {40..150/10} words.; Use bullet points.; Use a numbered list.; Use a(n) {tone} tone.; End with a
    question.; Write it for {adult_kid}.; Add a short title.; Avoid technical terms.; Give one concrete example.;
    Start with a one-sentence summary.; Put the result in a table with two columns.; Write exactly {3..7} sentences.;
    Mention one counterargument.; Finish with a short piece of advice.
mail: Keep it under {60..150/10} words.; Add a subject line.; Make it sound {tone}.; Offer two different versions.;
    Leave blanks where I need to fill in details.; Include one specific detail so that it does not sound generic.;
    Close with a polite question.; Do not use exclamation marks.
tale: Keep it under {80..200/20} words.; End with a surprise.; Write it in the first person.; Include some dialogue.;
    Make it suitable for {adult_kid}.; Use a(n) {tone} voice.; Give it a title.; Let it happen {setting}.; End with a
    short moral.; Only tell the opening scene.
"""

TEMPLATES = r"""
advice @form: {Trouble}. What can I do about it?
advice-friend @form: A friend told me: "{Trouble}." How should I answer to be helpful without being pushy?
advice-steps @form: I want to {goal} within {2..12} months. Give me a plan with small weekly steps.
advice-mistakes @form: What are the most common mistakes of people who want to {goal}, and how can I avoid them?
advice-column: Answer this letter as an advice columnist: "Dear Alex, {trouble}, and I also want to {goal}. Yours,
    {feeling} in {place_city}."
motivate @form: Write a short pep talk for someone who is trying to {goal} but feels {feeling} today.
habit @form: Suggest {3..7} small habits that help a person to {goal}.
decide @form: I cannot decide whether to {goal} or to {goal} this year. Which questions should I ask myself?
email @mail: Write an email to {person} {mail_goal}.
email-tone @mail: Please draft a(n) {tone} message to {person} {mail_goal}, signed by {name}.
letter @mail: {name} needs a letter to {person} {mail_goal}. Write it with a greeting, a main part and a closing.
reply @mail: I got this note from {person}: "{Rough}." Write a(n) {tone} reply.
text-short @mail: Write a text message of at most {20..50/5} words to {person} {mail_goal}.
complaint @mail: My new {thing} broke after {2..20} days. Write a complaint to the store and ask for {a refund|a
    replacement|a repair|a discount}.
cover @mail: Write the opening paragraph of a cover letter for {name}, who wants to work as a(n) {job} and is known
    for {quality}.
thank-note @mail: Write a thank-you note from {name} to {person} for {a lovely dinner|help during the move|a surprise
    gift|good advice|a ride to the airport|watering the plants}.
announce @mail: Write a notice for the hallway of our building about {a water shutdown|a lost cat|a noise rule|a roof
    repair|a shared garden day|a missing package} on {weekday}, {2..9} o'clock.
invite @mail: Write an invitation to a(n) {event} on {weekday} at {2..8} in the afternoon, hosted by {name}.
story @tale: Write a short story about {hero} who {quest}.
story-set @tale: Tell a story set {setting} in which {hero} {quest}.
story-two @tale: Write a scene where {hero} meets {hero} {setting}.
story-start @tale: Continue this story: "It was the last evening of {season}, and {hero} stood {setting}, feeling
    {feeling}."
story-last @tale: Write a story that ends with the sentence "And that is how {hero} learned about {quality}."
bedtime @tale: Tell a calm bedtime story about {hero} and {topic}.
mystery @tale: Invent a small mystery {setting}: something is missing, {name} is a witness, and {hero} solves it.
dialogue @tale: Write a dialogue between {hero} and a(n) {persona} about {topic}.
diary @tale: Write a diary entry by {hero} on the day when everything went wrong {setting}.
fable @tale: Write a fable about {quality} with two animals, a(n) {animal} and a(n) {animal}.
plot @form: Outline a plot for a {children's book|short film|radio play|comic|novel} about {hero} who {quest}, in
    {3..6} chapters.
titles: Suggest {5..12} titles for a book about {hero} who {quest} {setting}.
character @form: Describe a character for a novel: a(n) {job} who loves {topic} and hides a secret.
first-line: Write {3..8} different first lines for a novel about {topic} set {setting}.
summary @form: Summarize this paragraph in one sentence: "{paragraph}"
summary-bullets: List the main points of the following text. "{paragraph}" Use at most {2..5} short bullets.
headline: Write {2..5} possible newspaper headlines for this text: "{paragraph}"
simplify-text: Rewrite this text so that {adult_kid} understands it: "{paragraph}"
questions-text: Read the text and write {2..5} questions about it with answers. Text: "{paragraph}"
extract: From the text below, list who did what, and why, as far as it is stated.\n\n{paragraph}
fact-opinion: Which sentences of this text state facts and which state opinions? "{paragraph}"
continue-news: Add {2..4} sentences to this news item, one of them a quote by {name}: "{paragraph}"
text-tone: Rewrite this in a(n) {tone} tone and keep all facts. "{paragraph}"
list-ideas @form: List {4..12} ideas for activities related to {topic} for {group}.
list-reasons @form: Give me {3..8} good reasons to care about {topic}.
list-facts @form: Share {3..8} interesting facts about {topic} that most people do not know.
list-pack: Make a packing list for {group} who spend {2..14} days in {place_city} in {season} and like {topic}.
list-names: Suggest {5..12} names for a(n) {business} that should sound {tone}, and explain the best one.
list-questions: Write {5..10} questions that I could ask a(n) {job} about their work and about {topic}.
list-gifts: Suggest {4..9} gifts for {person} who likes {topic}, with {budget_size}.
recipe @form: Give me a simple recipe with {ingredient}, {ingredient} and {ingredient}.
recipe-diet @form: I need a(n) {diet} {meal} with {ingredient} that takes at most {15..60/5} minutes.
recipe-left: I have leftover {ingredient}, some {ingredient}, {ingredient} and about {15..60/5} minutes. What can I
    cook without going shopping?
menu: Plan a(n) {diet} menu for {3..7} days that uses {ingredient} twice and {ingredient} once, in a table.
substitute @form: What can I use instead of {ingredient} in a(n) {meal}, and how does it change the taste?
cook-how @form: What is the best way to store and prepare {ingredient} so that nothing is wasted?
travel-plan @form: Plan {2..7} days in {place_city} for {group} with {budget_size}.
travel-day: Describe a perfect {season} day in {place_city} for {group} interested in {topic}, from breakfast to
    bedtime.
travel-tips @form: What should {group} know before the first visit to {place_city}?
travel-compare @form: Should {group} go to {place_city} or to {place_city} in {season}?
travel-guide: You are a tour guide in {place_city}. Welcome {group} and introduce a walk about {topic} in about
    {60..120/10} words.
travel-postcard: Write a postcard from {place_city} to {person}. The weather is {awful|perfect|strange|hot|freezing},
    and you feel {feeling}.
compare @form: Compare {compare_pair} for {adult_kid}.
compare-table: Make a table that compares {compare_pair} by {3..5} criteria, and say which one suits {group}.
compare-debate: Write a short debate between {name} and {name} about {compare_pair}, with {2..4} turns for each side.
pros-cons @form: What are the pros and cons of {topic} for {group}?
role @form: You are a(n) {persona}. Explain {topic} to a visitor.
role-interview: Pretend to be {figure} and answer {2..5} interview questions about your life, your work and {quality}.
role-game: Let us play a game. You are a(n) {persona} {setting} and I am {hero}. Start the conversation with one vivid
    paragraph.
role-help: As a(n) {persona}, what would you tell someone who says: "{Trouble}"?
role-monologue: Write a monologue for a(n) {persona} who feels {feeling} and talks about {topic} {setting}.
role-sell: Act as a(n) {persona} and try to sell me a(n) {thing} in about {50..120/10} words.
define @form: What is {term}? Explain it to {adult_kid}.
define-two @form: Explain the difference between {term} and {term} with one example for each.
define-sentence: Use the idea of {term} in {2..5} sentences that make its meaning clear to {adult_kid}.
define-metaphor: Explain {term} with a metaphor about {cooking|sport|a river|a house|a garden|a train|an orchestra},
    for {adult_kid}.
science @form: Can you explain {science} in simple words?
science-kid @form: My child asked me {science}. How should I explain it to {adult_kid}?
science-test: Describe a safe home experiment that helps {adult_kid} understand {science}. List the materials and the
    steps.
science-myth @form: What do people often get wrong when they explain {science}?
science-quiz: Write {3..5} multiple-choice questions about {science}, with the correct letters at the end.
animal @form: Describe how a(n) {animal} lives, what it eats and how it raises its young.
animal-versus @form: How are a(n) {animal} and a(n) {animal} different, and what do they share?
animal-diary: Write one day in the life of a(n) {animal} from its own point of view, in about {80..150/10} words.
history @form: Explain {history} and why it mattered.
history-time: Make a timeline with {3..7} entries for {history}, one line each.
history-letter: Write a letter from someone who lived at the time of {history} to a relative, with details of daily
    life.
history-what-if: How might the world look today without {history}? Give {2..4} careful guesses.
history-news: Write a news report as if {history} had just been in the news, {60..120/10} words.
biography @form: Who was {figure1} and what is {figure1} remembered for? Please be precise.
figure-meet: Imagine that {figure} meets {figure} {setting}. What would they talk about?
figure-lesson @form: What can we learn about {quality} from the life of {figure}?
brainstorm @form: Brainstorm {5..15} ideas for a(n) {event} with {budget_size}.
brainstorm-name: Help me find a slogan for a(n) {business} in {place_city}. Offer {4..8} options, each under {6..9}
    words.
brainstorm-solve @form: Think of {3..7} unusual ways to make {topic} more popular among {buyer}.
brainstorm-uses: List {5..12} creative uses for an old {thing}, from practical to silly.
business-plan @form: Write a one-page plan for a(n) {business} in {place_city}: idea, customers, costs and first
    steps.
business-risk @form: What could go wrong in the first year of a(n) {business}, and how can the owner prepare with
    {budget_size}?
event-plan: Make a checklist to organize a(n) {event} for {10..80/5} guests, ordered by time, with {budget_size}.
event-speech: Write a(n) {tone} speech of about {60..150/10} words that {name} can give at a(n) {event}.
event-schedule: Write a schedule for a(n) {event} from {1..4} to {5..9} in the afternoon, with a break for snacks with
    {ingredient}.
rewrite @mail: Rewrite this so that it sounds {tone}: "{Rough}."
rewrite-grammar: Correct the grammar and explain each change: "{Rough}." Then write a(n) {tone} version.
rewrite-short: Make this shorter without losing information: "{paragraph}"
rewrite-style: Rewrite the sentence "{sentence}" in the style of {a fairy tale|a news report|a sports commentary|a
    legal contract|a love letter|a weather forecast|a pirate}.
rewrite-synonyms: Write the sentence "{sentence}" in {3..6} different ways with the same meaning.
translate: Translate this sentence into {language}: "{sentence}" Then explain one grammar point in it.
translate-two: How do you say "{sentence}" in {language} and in {language}? Give a word-by-word gloss too.
vocabulary: Make a list of {6..15} useful {language} words about {topic}, with English meanings.
phrasebook: Write a small {language} phrasebook for {group} who visit {a market|a doctor|a train station|a
    restaurant|a hotel|a school}, with {5..10} phrases.
language-tip @form: How can a beginner remember {language} words about {topic} more easily?
poem: Write a(n) {poem_kind} about {topic} in a(n) {tone} mood.
poem-person: Write a(n) {poem_kind} for {person} about {quality} and {season}.
poem-words: Write a(n) {poem_kind} that contains the words "{thing}", "{animal}" and "{season}".
song: Write the chorus and one verse of a song about {topic} sung by a(n) {persona}.
riddle: Write {2..5} riddles whose answers have to do with {topic}, and give the answers at the end.
joke: Tell me {2..4} clean jokes about {topic} that {adult_kid} would like.
product @mail: Write a product description of a(n) {thing} for {buyer}.
product-review: Write a(n) {tone} review of a(n) {thing} after {2..12} weeks of use, with {1..5} out of 5 stars.
product-ad: Write a radio ad of about {40..90/10} words for a(n) {business} that now also sells a(n) {thing}.
product-faq: Write {3..6} frequently asked questions with answers for a(n) {thing} that is sold to {buyer}.
product-manual: Write a short manual for a(n) {thing}: parts, first use, care and one warning, in a(n) {tone} voice.
interview-job: Give {4..9} interview questions for the position of a(n) {job} and say what a good answer would show.
interview-answer @form: In an interview for a job as a(n) {job}, how should I answer "{Tell me about a mistake you
    made|Why do you want to leave your job|What is your greatest strength|How do you handle stress|Where do you see
    yourself in five years|Why should we hire you}"?
interview-role: Interview me for a job as a(n) {job}. Ask the first question and say what you will look for,
    especially {quality}.
job-day @form: What does a typical day of a(n) {job} look like?
job-post @mail: Write a job posting for a(n) {job} at a(n) {business} in {place_city}.
job-skills @form: Which skills does a(n) {job} need, and how can {adult_kid} start to learn them?
opinion @form: What do you think about {topic}? Give arguments for both sides before you conclude.
opinion-essay: Write the first paragraph of an essay that argues {for|against} more public money for {topic}.
opinion-rank: Rank {topic}, {topic} and {topic} by how much they improve daily life, and defend your order.
opinion-letter: Write a letter to the editor by {name} from {place_city} who is {feeling} about {topic}.
opinion-change @form: What would change the mind of someone who dislikes {topic}?
explain-topic @form: Give a beginner's introduction to {topic}.
explain-start @form: How do I get started with {topic} if I have only {10..60/5} minutes a day and {budget_size}?
explain-history @form: How did {topic} change over the last hundred years?
explain-why @form: Why are so many people {interested in|skeptical about|passionate about} {topic}?
future @form: How could {topic} look {10..90/10} years from now?
lesson-plan: Plan a {20..60/10} minute class about {topic} for {adult_kid}, with a goal, an activity and a closing
    task.
flashcards: Make {4..9} flashcards about {topic} in the form "Front: ... Back: ..." for {adult_kid}.
quiz: Write a quiz with {4..8} true-or-false statements about {topic} and mark the answers.
schedule @form: Make a weekly timetable for someone who works {20..45/5} hours and wants to {goal} and {goal}.
checklist @form: Write a checklist for {name} to use before {a long trip|a job interview|an exam|a first date|moving
    day|a
    big presentation|a medical visit}.
social-post: Write a social media post by a(n) {business} in {place_city} about {topic}, at most {30..60/5} words,
    with
    two hashtags.
blog: Write the introduction of a blog post called "{What I learned from|The quiet joy of|A beginner's guide to|Five
    myths about|My year with} {topic1}", in a(n) {tone} voice.
toast: Write a toast of {4..7} sentences for {person} at a(n) {event}, with a small joke about {topic}.
small-talk: Give me {4..8} small-talk openers about {topic} that work with {person}.
apology: {name} forgot the {event} of a friend. Write an apology that is {tone} and offers to make up for it.
quote: Invent {3..6} short sayings about {quality} that sound like old proverbs, and explain one of them to
    {adult_kid}.
words-of: Describe {topic} using only short words, as a(n) {persona} would do it, in {3..6} sentences.
five-senses: Describe {season} in {place_city} through the five senses, one sentence for each, in a(n) {tone} tone.
journal: Give me {4..9} journal prompts for someone who feels {feeling} and thinks about {topic}.
game-rules: Invent a simple game for {group} that uses a(n) {thing} and is about {topic}. Explain the rules in {4..7}
    steps.
debate-motion: Write {3..5} debate motions about {topic} and one strong argument for each side of the first motion.
"""
