"""The simulated user of the quickstart: asks everyday questions and reacts in plain words.

The user is two-sided, as people are. A reply pleases when it is one or two finished sentences of
6 to 25 words in all and speaks of what was asked. Anything else is corrected in plain English, and
now and then a pleasing reply gets no comment. Nothing here scores a reply for the trainer, which
has to read the signal out of the words, as it would with a real person.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

MIN_WORDS = 6
MAX_WORDS = 25
MAX_SENTENCES = 2
SILENT_SHARE = 0.2
"""How often a pleasing reply gets no comment (a neutral turn, without a signal)."""


class Verdict(Enum):
    """What the user thinks of a reply."""

    PLEASED = "pleased"
    EMPTY = "empty"
    TOO_LONG = "too long"
    TOO_SHORT = "too short"
    UNFINISHED = "unfinished"
    OFF_TOPIC = "off topic"


@dataclass(frozen=True)
class Question:
    """A question, what it is about, and word stems of which an answer contains at least one."""

    text: str
    subject: str
    stems: tuple[str, ...]


@dataclass(frozen=True)
class Opinion:
    """The user's view of one reply, with the subject the question was about."""

    verdict: Verdict
    subject: str

    @property
    def pleased(self) -> bool:
        """Whether the reply was what the user wanted."""
        return self.verdict is Verdict.PLEASED


def _parse(table: str) -> tuple[Question, ...]:
    """Read lines of ``question | subject | stem stem ...``."""
    rows = ([cell.strip() for cell in line.split("|")] for line in table.strip().splitlines())
    return tuple(Question(text, subject, tuple(stems.split())) for text, subject, stems in rows)


TRAIN_QUESTIONS = _parse("""
What is rain? | rain | rain water cloud drop
Why is the sky blue? | the sky | sky blue light scatter
How do I boil an egg? | boiling an egg | egg boil water pot
What does a bank do? | banks | bank money loan deposit
What is a volcano? | volcanoes | volcan lava erupt magma
How do plants grow? | plants | plant grow seed soil root
What is gravity? | gravity | gravit force pull mass
Why do we sleep? | sleep | sleep rest brain bod
What is bread made of? | bread | bread flour dough yeast wheat
How does a bicycle work? | bicycles | bicycle bike pedal wheel
What is the Moon? | the Moon | moon earth orbit satellite lunar
Why do leaves change color? | leaves | lea color chlorophyll autumn fall
What is a computer? | computers | computer machine device data
How do birds fly? | birds | bird wing fly flight air
What is democracy? | democracy | democra vote people government citizen
How do I make tea? | tea | tea water boil leaves cup
What is a desert? | deserts | desert dry rain arid sand
Why is exercise good for us? | exercise | exercis health bod fit muscle heart
What is ice? | ice | ice water froz freez
How do fish breathe? | fish | fish gill water oxygen breath
What is a library? | libraries | librar book read borrow
What causes thunder? | thunder | thunder lightning air storm sound
How do I clean a window? | cleaning windows | window clean glass cloth wipe
What is electricity? | electricity | electri energy current charge power
How does soap work? | soap | soap dirt oil water clean grease
What is an island? | islands | island land water sea ocean
What is salt? | salt | salt sodium mineral food
What is a guitar? | guitars | guitar string music instrument
What do bees do? | bees | bee pollin honey flower hive
How do I save money? | saving money | money sav budget spend
Why do we need water? | water | water hydrat drink bod
What is a vaccine? | vaccines | vaccin immun disease virus
How does a magnet work? | magnets | magnet field attract iron pole
What is a teacher? | teachers | teach student learn school
How do I learn a new language? | learning a language | language learn practic word speak
What is cheese? | cheese | cheese milk dairy
Why does the Moon shine? | moonlight | moon light sun reflect
What is a forest? | forests | forest tree wood
How do airplanes fly? | airplanes | plane air wing lift fly
How do I plant a tree? | planting a tree | tree plant hole soil root
What is a museum? | museums | museum art histor collection exhibit
Why do dogs bark? | dogs | dog bark
What is a river? | rivers | river water stream flow
How does a clock work? | clocks | clock time hour hand gear
What is a hospital? | hospitals | hospital patient doctor medical care
How do I cook rice? | cooking rice | rice cook water boil
What is a rainbow? | rainbows | rainbow light color rain
Why do we brush our teeth? | brushing teeth | teeth tooth brush dental
""")

HELD_OUT_QUESTIONS = _parse("""
What is snow? | snow | snow ice water flake
How do I make coffee? | coffee | coffee water bean brew
What is the Sun? | the Sun | sun star light heat
Why do we eat vegetables? | vegetables | vegetable vitamin health nutri
How does a refrigerator work? | refrigerators | refriger cool cold heat fridge
What is a school? | schools | school learn student educat
What is a piano? | pianos | piano key music instrument
How do I wash my hands? | washing hands | hand soap water wash
Why is the ocean salty? | the ocean | ocean salt sea water
What is a dictionary? | dictionaries | dictionar word meaning definition
How do spiders make webs? | spiders | spider web silk
What is a mountain? | mountains | mountain land peak high hill
What causes earthquakes? | earthquakes | earthquake plate ground fault
How do I bake a cake? | baking a cake | cake bak flour oven
What is a telephone? | telephones | phone communicat call talk
Why do people dance? | dancing | danc music joy express
What is glass? | glass | glass sand transparent window
How does a boat float? | boats | boat water float buoy
What is a doctor? | doctors | doctor medic patient health
What is wind? | wind | wind air
How do I take care of a dog? | dogs | dog food walk pet
What is a bridge? | bridges | bridge river cross road
Why do we have seasons? | seasons | season earth sun tilt year
What is chocolate? | chocolate | chocolate cocoa sweet bean
""")

PHRASES: dict[Verdict, tuple[str, ...]] = {
    Verdict.PLEASED: ("Perfect, thanks.", "Great, thank you.", "Thanks, that is just right."),
    Verdict.EMPTY: (
        "You did not say anything, please answer in one full sentence.",
        "Your answer is empty, please give me one full sentence.",
    ),
    Verdict.TOO_LONG: (
        "Too long, please answer in one short sentence.",
        "That is too long, please answer in one or two short sentences.",
        "That is too much, please keep it to one short sentence.",
        "Please be brief, one short sentence is enough.",
    ),
    Verdict.TOO_SHORT: (
        "That is too short, please answer in one full sentence.",
        "Too short, please explain it in a full sentence.",
        "That is not enough, please give me a complete sentence.",
    ),
    Verdict.UNFINISHED: (
        "You did not finish, please answer in one short and complete sentence.",
        "That is cut off, please give me one complete sentence that ends with a period.",
    ),
    Verdict.OFF_TOPIC: (
        "You did not answer about {subject}, please answer my question in one short sentence.",
        "That is not what I asked, please tell me about {subject} in one short sentence.",
    ),
}
"""What the user says. A correction is also an instruction, so it can serve as a hint as it is."""

GOODBYE = "That is all for today."
"""Closes a conversation in which the last reply gets no comment."""

_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|Dr|Mr|Mrs|Ms|St|U\.S)\.(?=[\s,])")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]*”]*(?=\s|$)")


def count_words(text: str) -> int:
    """Count the whitespace-separated words that hold a letter or a digit."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def count_sentences(text: str) -> int:
    """Count sentences; a line break ends one too, so a list counts an item a sentence."""
    lines = _ABBREVIATION.sub(r"\1", text).splitlines()
    return sum(count_words(piece) > 0 for line in lines for piece in _SENTENCE_END.split(line))


def judge_reply(question: Question, reply: str) -> Opinion:
    """Form the user's opinion of ``reply`` as an answer to ``question``."""
    text = reply.strip()
    words = count_words(text)
    if words == 0:
        verdict = Verdict.EMPTY
    elif words > MAX_WORDS or count_sentences(text) > MAX_SENTENCES:
        verdict = Verdict.TOO_LONG
    elif words < MIN_WORDS:
        verdict = Verdict.TOO_SHORT
    elif not re.search(_SENTENCE_END.pattern + r"\Z", text):
        verdict = Verdict.UNFINISHED
    elif not any(re.search(rf"\b{re.escape(s)}", text, re.IGNORECASE) for s in question.stems):
        verdict = Verdict.OFF_TOPIC
    else:
        verdict = Verdict.PLEASED
    return Opinion(verdict, question.subject)


def react(opinion: Opinion, rng: random.Random, silent_share: float = SILENT_SHARE) -> str:
    """Put an opinion into words; empty where a pleased user says nothing about the reply."""
    if opinion.pleased and rng.random() < silent_share:
        return ""
    return rng.choice(PHRASES[opinion.verdict]).format(subject=opinion.subject)


@dataclass
class Conversation:
    """One conversation: send ``opening()``, then ``answer(reply)`` till ``finished``.

    The last message only reacts: it gives the last answer its next state and asks nothing.
    """

    questions: Sequence[Question]
    rng: random.Random
    silent_share: float = SILENT_SHARE
    opinions: list[Opinion] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every question is answered, so that the reply to come is of no interest."""
        return len(self.opinions) == len(self.questions)

    def opening(self) -> str:
        """The first message: the first question and nothing else."""
        return self.questions[0].text

    def answer(self, reply: str) -> str:
        """Judge ``reply`` and return the user's next message: the reaction, then a question."""
        if self.finished:
            raise ValueError("the conversation is over")
        opinion = judge_reply(self.questions[len(self.opinions)], reply)
        self.opinions.append(opinion)
        reaction = react(opinion, self.rng, self.silent_share)
        if self.finished:
            return reaction or GOODBYE
        return f"{reaction} {self.questions[len(self.opinions)].text}".strip()


def draw_conversation(
    rng: random.Random, questions: Sequence[Question] = TRAIN_QUESTIONS, length: int = 2
) -> Conversation:
    """Draw a conversation of ``length`` different questions."""
    return Conversation(rng.sample(questions, length), rng)
