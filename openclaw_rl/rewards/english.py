"""How English speakers begin a clause about a reply: patterns for `words.py`, matched at the
beginning of a lower-case clause without punctuation.

Each list is about a kind of thing that people say, not about particular sentences.
"""

from __future__ import annotations

import re

_REPLY = (
    r"(?:(?:that|this|it|these|those|all (?:of )?(?:that|this))|(?:your|the|that|this) (?:last "
    r"|first |previous |whole )?(?:answers?|repl(?:y|ies)|responses?|code|solution|explanation"
    r"|summary|text|output|result|message|sentences?|version|suggestion|calculation|translation"
    r"|list|format|tone|wording|style)|(?:the|your|this|that) (?:first|second|third|last|final"
    r"|opening|closing) (?:paragraph|part|half|line|step|point|example|number|one|item|section"
    r"|bullet|word)|your (?:paragraph|steps?|points?|examples?|numbers?|poem|story|draft|essay"
    r"|email|letter|math|maths|arithmetic|facts?|grammar|spelling|logic|reasoning|ending|title))"
)
_BE = r"(?:(?: i|')s|(?: a|')re| is| are| was| were| looks?| sounds?| feels?| seems?)"
_HEDGE = (
    r"(?: (?:still|a|an|bit|little|way|far|much|just|so|very|really|quite|rather|completely"
    r"|totally|simply|also|already|again|actually|absolutely|exactly|kind of|sort of|pretty|all"
    r"|even|somewhat|slightly|entirely|plain|the|clearly|definitely|perfectly))*"
)
_NOT = r"(?: not|n't)"
_TOO = (
    r"too (?:long|short|wordy|verbose|brief|vague|general|generic|complicated|complex|technical"
    r"|simple|simplistic|simplified|detailed|formal|informal|casual|terse|dry|confusing|boring"
    r"|basic|advanced|abstract|broad|narrow|repetitive|dense|polite|cheerful|chatty|cluttered"
    r"|(?:hard|difficult) to (?:follow|read|understand)|(?:much|little)(?: (?:text|details?"
    r"|information|info|words|jargon|fluff|markdown|context|formatting|repetition|emphasis))?"
    r"|(?:many|few) (?:words|sentences|details|bullets?|bullet points|emojis?|examples|lists?"
    r"|adjectives|headings))"
)
_BAD = (
    r"(?:wrong|incorrect|false|inaccurate|untrue|mistaken|useless|unhelpful|incomplete|unfinished"
    r"|empty|blank|missing|cut off|truncated|off topic|off-topic|irrelevant|unrelated|confusing"
    r"|unclear|nonsense|rubbish|garbage|terrible|awful|horrible|bad|poor|broken|outdated"
    r"|out of date|made up|misleading|repetitive|unreadable|(?:a )?lie|hallucinated|backwards"
    r"|rude|poorly \w+|badly \w+|a mistake|an error|one of the worst|worse|(?:the )?worst"
    r"|disappointing|unacceptable|failing|nothing like what i \w+)"
)
_RIGHT = (
    r"(?:right|correct|true|accurate|enough|helpful|useful|good|great|clear|complete|relevant|ok"
    r"|okay|acceptable|working|readable|funny|(?:a|an) (?:answer|good \w+|full \w+|real \w+"
    r"|complete \w+)|(?:in )?(?:the|a) (?:right|correct) \w+|(?:at all )?(?:what|how|the way"
    r"|the one|the thing) i(?:'d|'ve| had| have)? ?(?:asked|meant|wanted|said|expected|needed|was"
    r"|am|want|need|mean|like|requested)|answering|related|about|for (?:what|the)|how (?:it|that"
    r"|this) works?)"
)
_FINE = (
    r"(?:perfect|great|excellent|awesome|wonderful|fantastic|brilliant|amazing|superb|lovely|nice"
    r"|good|right|correct|helpful|useful|clear|fine|spot on|ideal|terrific|outstanding|neat|cool"
    r"|beautiful|impressive|marvell?ous|fabulous|delightful|splendid|better|much better|on point"
    r"|well (?:said|put|done|written|explained)|it|the one|a (?:great|good|nice|perfect"
    r"|clear) (?:answer|reply|response|job|explanation|example|idea|start|summary|point"
    r"|suggestion|solution|one|way)|(?:exactly |just |precisely )?what i(?:'ve| have)? (?:wanted"
    r"|needed|asked for|meant|was looking for|was after|need|want|had in mind))"
)
_FORM = (
    r"(?:brief(?:er|ly)?|concise(?:ly)?|terse|short(?:er|ly)?|long(?:er)?|clear(?:er|ly)?"
    r"|simpl(?:e|er|y)|formal(?:ly)?|informal(?:ly)?|casual(?:ly)?|polite(?:ly|r)?|specific"
    r"|precise(?:ly)?|direct(?:ly)?|succinct(?:ly)?|detail(?:s|ed)?|sentences?|words?|paragraphs?"
    r"|lines?|bullets?|bullet points?|lists?|markdown|bold|plain|full|complete|json|tables?"
    r"|emojis?|headings?|format(?:ting)?|english|spanish|french|german|italian|chinese|japanese"
    r"|portuguese|russian|korean|arabic|metric|celsius|fahrenheit|kilometers|kilometres|miles"
    r"|jargon|examples?|length|to the point|point|friendl(?:y|ier)|warm(?:er)?|kind(?:er)?"
    r"|technical|careful|accurate|honest|sources?|step by step|own words|less|more)"
)
_LANGUAGE = (
    r"(?:english|german|french|spanish|italian|portuguese|chinese|japanese|russian|korean|arabic"
    r"|dutch|polish|turkish|hindi)"
)
_ABOUT_TOPIC = r"(?:about|how|what|why|when|where|who|which|whether|of|on|:)"
_NO_TOPIC = rf"(?!.*\b{_ABOUT_TOPIC}\b)"
_END = r"(?=\W*$)"
_ITS = (
    r"(?:it|that|this|them|things|these|your (?:answers?|repl(?:y|ies)|responses?)|the (?:answer"
    r"|reply|response))"
)
_POLITE = r"(?:please |kindly |just |then |so |next time |in (?:the )?future |from now on |and )*"


def _starts(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


REFUSALS = _starts(
    r"no,? (?:thanks?|thank you|thx|problem|worries|need|rush|hurry|questions?|idea|matter|doubt"
    r"|one|way|longer|big deal|offen[cs]e)\b",
    r"not (?:bad|perfect|too|necessarily|sure|yet|now|today|at the moment|to worry|only|that)\b",
    rf"(?:{_REPLY}{_BE}|it)?{_NOT}{_HEDGE} (?:perfect|bad|too|exactly perfect|a problem|"
    r"necessary|urgent|important|your fault|a complaint)\b",
    r"never ?mind\b",
    r"(?:you )?(?:don't|do not) (?:have|need|worry|bother|mind|know)\b",
    r"nothing (?:else|more|wrong)\b",
)
COMPLAINTS = _starts(
    rf"(?:(?:{_REPLY}|you)(?:{_BE}|'ve been)?)?(?:{_HEDGE} | ?)(?:(?:way|far|much|still|just"
    rf"|a bit|a little|rather|simply) )*{_TOO}(?: for (?:me|this|that|my|a|an|the|such)\b.*"
    rf"| to (?:read|follow|understand|be)\b.*| again| still| now| (?:please|pls)| here| and\b.*"
    rf"| or\b.*)?{_END}",
    rf"{_REPLY}{_BE}{_HEDGE} {_BAD}\b",
    rf"{_REPLY}(?:{_BE}{_NOT}| ain't){_HEDGE} {_RIGHT}\b",
    rf"(?:still |completely |just |also |plain |simply )*{_BAD}(?: again| still| too)?{_END}",
    r"(?:still |again |another |yet another )*(?:wrong|incorrect|bad|terrible|poor"
    r"|useless) (?:answer|reply|response|again|bot|result|format|language|tone|one)\b",
    r"(?:not|isn't|wasn't) (?:right|correct|true|helpful|useful|good|enough|quite|really|exactly"
    r"|at all|even close|what i (?:asked|meant|wanted|said|need|want))\b",
    rf"you(?: (?:did|do|have|were|are|should){_NOT}|'re not| still (?:did|do|have)?{_NOT}?)"
    r"(?! (?:have to|need|supposed to know)\b) ",
    r"you (?:just |simply |again |still |also |completely |totally |have |'ve )*(?:forgot"
    r"|forgotten|missed|misunderst(?:ood|and)|ignored|misread|skipped|left out|overlooked|omitted"
    r"|confused|failed|never|made (?:a|an|some|that|it|this) ?(?:mistakes?|errors?|up)?|got (?:it"
    r"|that|this|the|my|me|one) ?.*wrong|mixed up|keep|kept|repeat(?:ed)?|contradict(?:ed)?"
    r"|should (?:have|not|only|use|say|write|know|stop|be)|were supposed|are (?:wrong|mistaken"
    r"|not|missing|repeating|ignoring)|were wrong|only (?:gave|said|answered|listed)|stopped"
    r"|broke|hallucinat\w+|talk too|use too|wrote too|write too)\b",
    r"you'?re (?:wrong|mistaken|not|missing|repeating|ignoring|confus\w+)\b",
    r"i (?:did ?n['o]t|didn't|did not|never) (?:ask|mean|want|say|request|need)\b",
    r"i (?:do not|don't|can't|cannot|can not) (?:understand|follow|get|see) (?:it|this|that|your"
    r"|the (?:answer|reply|point)|what you|any)\b",
    rf"i (?:do not|don't|can't|cannot) (?:understand|follow|agree|think (?:so|that's right)"
    rf"|like it|like (?:that|this)){_END}",
    r"i (?:don't|do not) (?:like|want) (?:it|that|this|your|such|so|any|the (?:tone|format"
    r"|style))\b",
    r"i (?:actually |really |just |only )?meant\b(?! to (?:ask|say|tell|thank|write)\b)",
    r"i (?:only |just |clearly |specifically |already )*(?:asked|told) (?:you|for)\b",
    r"i (?:was asking|asked|was talking) (?:about|for)\b",
    r"(?:as|like) i (?:already )?(?:said|asked|mentioned|told you)\b",
    r"i (?:already |just |only )*said (?:no|not|only|in|one|that|i|it)\b",
    rf"{_REPLY}(?: still| just| also)?(?: does| do| did)?{_NOT}? (?:really |even |actually )?"
    r"(?:(?:not )(?:work|help|answer|compile|run|make sense|look right|match|address|fit|solve"
    r"|exist)|fails?|failed|crash(?:es|ed)|misses|missed|lacks|ignores|makes no sense"
    r"|made no sense|has (?:no|nothing|errors?|mistakes?|too)|contains (?:errors?|mistakes?|too)"
    r"|says nothing|ends in the middle|stops)\b",
    rf"{_REPLY}(?: still)? (?:does|do|did)(?:n't| not) (?:really |even |actually |quite )?(?:work"
    rf"|help|"
    r"answer|compile|run|make|look|match|address|fit|solve|exist|follow|say|tell|explain|mention"
    r"|include|use|seem|read|sound)\b",
    r"(?:it|that|this|there|the [\w ]{1,40}?) (?:should|shouldn't|must|ought to)(?: not)? (?:be"
    r"|have|say|read|return|start|end|use|look|contain)\b(?! (?:fine|good|enough|ok|okay|great"
    r"|perfect|all|sufficient|easy|possible|interesting)\b)",
    r"actually,? (?:it|that|this|he|she|they|the [\w ]{1,30}?)(?:'s| is| was| are| were| should"
    r"| has)(?! (?:perfect|great|good|fine|right|correct|ok|helpful)\b)",
    r"(?:thanks|thank you) for nothing\b",
    r"i (?:really |do |just )*(?:hate|dislike) (?:it|this|that)(?= when\b|\W*$)",
    r"i (?:really |do |just )*(?:hate|dislike) (?:how you|when you|your)\b",
    rf"{_REPLY} sucks?\b",
    r"i(?:'m| am)? (?:still (?:get|getting|got|see|seeing|have) |(?:get|got"
    r"|see) the same )(?:an? |the |this |same )*(?:\w+ )?(?:errors?|exceptions?|warnings?"
    r"|problems?|results?)\b",
    rf"{_POLITE}(?:try|do it|do that|read it|start|answer) again\b(?!.*\b{_ABOUT_TOPIC}\b)",
    rf"{_POLITE}(?:redo|fix|correct|undo|revert|rewrite|rephrase|shorten|simplify|reword) {_ITS}"
    r"(?= (?:please|now|again|so|to|and|because)\b|\W*$)",
    rf"{_POLITE}(?:answer|read|address|look at) (?:my|the|what i) "
    r"(?:actual |original |first |whole )?(?:question|request|message|asked|wrote)\b",
)
WISHES = _starts(
    rf"{_POLITE}be (?:a (?:bit|little) |much |more |less |very |as |so |extra |)*{_FORM}\b",
    rf"{_POLITE}(?:keep|make) {_ITS}\b.*\b{_FORM}\b",
    rf"{_POLITE}(?:always |only |simply )?(?:answer|reply|respond|write|explain|say|put|phrase"
    rf"|rewrite|speak|talk|state|describe)(?: (?:it|this|that|me|to me|again|back))*(?: (?:in"
    rf"|with|using|as|more|less|within|without|like)\b.*)?\b{_FORM}\b{_NO_TOPIC}",
    r"(?:please |kindly |just )*(?:give me|i (?:want|need|would like|'d like|prefer)|i'd (?:like"
    r"|prefer)|use|try|provide|add|include|show|write (?=only|just|more|fewer|shorter|longer"
    r"|simpler)) (?:only |just |me )*(?:(?:a|an|the|one|two|three|1|2|3|more|fewer|less|some|your"
    r"|full|complete|short|shorter|brief|briefer|long|longer|simple|simpler|plain|clear|concise"
    r"|better|direct|single|proper|real|different|straight|whole|or|and) )*(?:sentences?|answers?"
    r"|repl(?:y|ies)|responses?|version|lines?|paragraphs?|details?|words|explanation|language"
    r"|english|wording|text)\b"
    rf"{_NO_TOPIC}",
    rf"{_POLITE}(?:don't|do not|stop|never|no more|avoid) (?:use|using|add|adding|include"
    rf"|including"
    r"|repeat|repeating|apologi[sz]e|apologi[sz]ing|lecture|lecturing|be so|being so|guess"
    r"|guessing|make (?:things|stuff|it) up|making (?:things|stuff|it) up|ramble|rambling"
    r"|start with|end with|give me (?:so|such)|giving me|write (?:so|such)|bold"
    r"|explain everything|list|listing|bullet|emojis?|lists?|markdown|headings?)\b",
)
FRAGMENTS = _starts(
    rf"{_POLITE}(?:use|say|try|call it|make it|write it|put) (?:[\w-]+ ){{1,4}}instead{_END}",
    rf"{_POLITE}(?:in |speak |use ){_LANGUAGE}(?: (?:please|pls|only|now))*{_END}",
    rf"{_LANGUAGE} (?:please|pls|only){_END}",
    rf"(?:{_POLITE})(?:much |a (?:bit|little) )?(?:shorter|longer|briefer|simpler|clearer"
    rf"|slower)(?: (?:please|pls|next time|answers?|repl(?:y|ies)|version|sentences?"
    rf"|and \w+))*{_END}",
    rf"(?:{_POLITE})(?:more|less|fewer|no) (?:details?|concise|formal|brief|specific|verbose"
    rf"|wordy|technical|words|text|markdown|emojis?|lists|bullet points|bullets|jargon"
    rf"|bold)(?: (?:please|pls|next time))*{_END}",
    rf"(?:{_POLITE})(?:in |only |use )?(?:one|two|a|1|2|full|plain|simple|fewer|complete"
    rf"|short) (?:(?:or|and|short|full|simple|complete|single|two|plain|whole) )*(?:sentences?"
    rf"|words|paragraphs?|lines?|english|words only)(?: (?:please|pls|only|next time|is enough"
    rf"|will do|at most|max))*{_END}",
)
PRAISES = _starts(
    rf"(?:(?:absolutely|just|simply|really|very|so|quite|most|how|truly|pretty) )*(?:perfect"
    rf"|perfectly|great|excellent|awesome|wonderful|fantastic|brilliant|amazing|superb|lovely"
    rf"|nice|good|cool|neat|helpful|correct|exactly|precisely|bravo|beautiful|impressive|terrific"
    rf"|outstanding|right on|spot on|well done|nicely done|much better|better|that's it"
    rf"|marvell?ous|fabulous|clear|love it|loved it|yay|hooray|kudos)(?: (?:now|again|indeed|too"
    rf"|as always|as usual|this time|then|and (?:clear|short|brief|concise|helpful|simple"
    rf"|to the point|useful"
    r"|quick|thanks?.*|thank you.*)|so far|work|job|answer|one"
    rf"|reply|response|explanation|stuff|summary|example|point|catch|idea|suggestion|advice"
    rf"|thanks?.*|thank you.*|thx|exactly|much|everyone|there|that (?:is|was|works|helps|helped"
    rf"|'s).*))?{_END}",
    r"(?:(?:ok|okay|ah|oh|wow|yes|yeah|cool|great|perfect|nice|many|so|big|good) )*(?:thank you"
    r"|thank u|thanks|thx|ty|tysm|cheers)(?! (?:to|god|goodness|heaven|in advance|giving|notes?"
    r"|cards?|letters?|emails?|speech)\b)(?=$|\W|\b)(?! (?:means?|is|are|was|has)\b)",
    r"(?:much|really|very much|greatly) appreciated\b",
    r"(?:(?:it|that|this|all) )?(?:sounds|looks|reads|seems) (?:very |really |so )?(?:good|great"
    r"|perfect|right|excellent|nice|correct)\b",
    r"lgtm\b",
    r"(?:exactly|just|precisely) (?:what|how|as|the way|the one|the thing) i (?:wanted|needed"
    r"|asked|meant|was|want|need|had|like|hoped)\b",
    r"i (?:really |very much |truly |just |do )*(?:love|loved|like|liked|appreciate"
    r"|enjoy(?:ed)?) (?:your|the (?:answer|reply|way you|tone|style|format)|(?:this"
    r"|that) (?:answer|reply|response|explanation|one|version|style|format)|(?:it|this"
    r"|that)(?= (?:so|a lot|very|much|now|when you)\b|\W*$))\b",
    r"i (?:like|love) how (?:you|it|that)\b",
    rf"(?:yes |yeah |yep |ok |oh |wow )*{_REPLY}{_BE}{_HEDGE} {_FINE}(?: (?:now|again|indeed|too"
    rf"|thanks?.*|thank you.*|answer.*|for me|to know|work|job|explanation|and .*|as it is"
    rf"|this time|way|one|length|size))*{_END}",
    rf"{_REPLY}(?: really| totally| actually| now| all)? (?:helps?|helped|works?|worked|did it"
    rf"|did the trick|does it|does the trick|solved it|answers (?:it|my|the)|makes (?:total "
    rf"|perfect |a lot of |more )?sense|made sense|clarifies|fixed it)\b",
    r"works? (?:great|perfectly|now|well|fine|like a charm|for me)\b",
    r"(?:you(?: a|')re|you are) (?:absolutely |totally |completely |so )?(?:right|correct"
    r"|the best|awesome|great|amazing|a lifesaver|a genius|brilliant|welcome)\b",
    r"you (?:nailed|got|did) it(?: right| perfectly)?" + _END,
    rf"(?:yes|yep|yeah|indeed)(?: (?:exactly|perfect|correct|that's it|that is it"
    rf"|precisely)){_END}",
    r"(?:great|good|nice|excellent|amazing|fantastic|wonderful|awesome|brilliant) (?:job|work"
    r"|answer|explanation|response|reply|stuff)\b",
)
OPENERS = re.compile(
    r"(?:ok(?:ay)?|well|hm+|hmm+|oh|ah|so|right|alright|all right|hi|hello|hey(?: there)?|sorry"
    r"|wait|um+|yes|yeah|yep|sure|got it|i see|understood|interesting|and|but|however|also|wow"
    r"|ha(?:ha)*|look|listen|come on|good (?:morning|evening|afternoon)|excuse me|actually"
    r"|honestly|please|almost(?: there| perfect| right| correct)?|close(?: enough| but)?"
    r"|nearly(?: there| right)?|really|though|still|unfortunately|fair enough|i think|i know"
    r"|i'm afraid|sadly|ugh+|argh+)$"
)
LEADING = re.compile(
    r"(?:(?:ok(?:ay)?|well|hm+|oh|ah|so|alright|hi|hello|hey|sorry|wait|um+|but|however|and"
    r"|although|though|yet|actually|honestly|unfortunately|i think|i'm afraid|i know|ugh+|wow"
    r"|because|since|sadly|frankly|again|no|nope|yes|yeah|now) )+"
)
ASKS = re.compile(
    r"(?:now |next |then |ok |okay |so |and |but |also |please |first |another question "
    r"|by the way |one more (?:thing|question) )*(?:what|what's|why|how|how's|who|who's|whom"
    r"|whose|when|where|where's|which|can|could|would|will|shall|may|might|should|is|are|am|was"
    r"|were|do|does|did|has|have|had|isn't|aren't|don't you|doesn't|didn't|won't|any|tell me"
    r"|show me|let's|let us|i have (?:a|another|one)|i'd like to (?:know|ask)|i want to (?:know"
    r"|ask))\b"
)
NEXT_TASK = re.compile(r"(?:now|next|then|also|another|moving on|on to|and now|let's|let us)\b")
DO_OVER = re.compile(
    r"(?:now |so |and |but |please |ok |okay )*(?:can|could|would|will) (?:you|u) (?:please "
    r"|kindly |maybe |perhaps |just |also |possibly )*(?:(?:shorten|rewrite|rephrase|redo|fix"
    r"|correct|simplify"
    rf"|reword|condense|clarify|reformat) {_ITS}\b|(?:make|keep) {_ITS}\b.*\b{_FORM}\b"
    rf"|be (?:a (?:bit|little) |much |)*(?:more |less |){_FORM}\b|try (?:that |it |this )?again\b"
    rf"|do (?:it|that|this) (?:again|over)\b|(?:answer|explain|say|write|put|summari[sz]e) (?:it"
    rf"|that|this|again)\b.*\b{_FORM}\b{_NO_TOPIC})"
)
FIRST_PERSON = re.compile(r"(?:i|i'm|i've|i'd|my|we|we're|our|me)\b")
REQUEST = re.compile(
    r"(?:please |kindly |just )*(?:give|write|tell|show|list|explain|describe|translate"
    r"|summari[sz]e|make|create|find|search|open|read|run|help|compare|calculate|compute|solve"
    r"|draw|generate|send|add|remove|delete|check|look|go|continue|let|suggest|recommend|name"
    r"|define|convert|plan|book|remind|set|play|call|implement|build|install|update|change|rename"
    r"|move|copy|try|do)\b"
)
NO = re.compile(r"(?:no+|nope|nah)(?: (?:no+|nope|nah))*$")
"""A clause that is nothing but "no"."""

NO_AND = re.compile(
    r"(?:no+|nope|nah) (?=(?:i|it|it's|that|that's|this|you|the|he|she|they|its)\b)"
)
FINE = re.compile(
    r"(?:that|it|this|i|everything)(?:'s| is| was|'m| am)? (?:all|fine|ok|okay|enough|it|good"
    r"|done|alright|all right|not necessary|don't|do not|have no)\b"
)
PRONOUN = re.compile(r"(?:i|it|that|this|you|the|he|she|they|its|my|your|we)\b")
TO_THE_REPLY = re.compile(r"(?:.*\b)?(?:you|you're|you've|your|the (?:answer|reply|response))\b")
THIS_HELPED = re.compile(r"(?:that|this|it|the|now|your|you|works?|solved|fixed|got it|exactly)\b")
EXCLAMATION = re.compile(
    r"(?:what an? (?:great|nice|good|lovely|wonderful|excellent|perfect|helpful|amazing)"
    r"|how (?:nice|lovely|helpful|wonderful|perfect|great|cool))\b"
)
WH_WORD = re.compile(
    r"(?:and |so |but |now |ok |then )*(?:what|why|how|who|whom|whose|when|where|which)(?:'s)?\b"
)
BARE = re.compile(
    r"(?:(?:no+|nope|nah|wrong|incorrect|bad|terrible|false|that|this|it|is|was|'s|isn't|are|not"
    r"|right|correct|true|good|answer|reply|response|still|just|sorry|but|really|useless|again"
    r"|you|your|the|helpful|very|so|hm+|well|nonsense|rubbish|awful|poor|horrible|even|at"
    r"|all)\b\W*)*"
)
"""Displeasure without anything to learn from."""
BUT = re.compile(r"(?:but|however|although|though) ")
BUT_WRONG = re.compile(
    rf"\b\w+(?:{_BE}{_HEDGE} (?:{_BAD}|{_TOO})|{_BE}{_NOT}{_HEDGE} {_RIGHT})\b"
    r"|(?:but|however|although|though) (?:please |next time |you |could you |can you )*(?:remove"
    r"|drop|avoid|fix|change|add|use|leave out|skip|keep|make|be|forgot|missed|don't|do not)\b"
    r"|but i (?:need|want|wanted|asked|meant|said|prefer|would prefer|would like|was looking"
    r"|expected)\b"
)
"""What "but" after praise may bring: then the praise was only politeness."""

OTHER_ONE = re.compile(
    r"not (?!now\b|yet\b|today\b|really\b|at the\b|necessary\b|needed\b|for now\b)"
)
"""After "no": "not that one"."""
