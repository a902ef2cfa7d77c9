"""Names of units and of things counted in languages other than English, with their English names.

A word with other letters than a to z counts as a unit only if it stands here or in `measures.py`: a word that is not
known may as well change the number (`5 треть` is five thirds). Chinese is left out (`numerals.changes_number`).
"""

from __future__ import annotations

import re
import unicodedata

from posttrain.verify.measures import find_measure

# A line: the English name, and its forms elsewhere.
_TABLE = """
meter mètre mètres метр метра метров метры м メートル 미터 متر मीटर เมตร
kilometer kilomètre kilomètres kilómetro kilómetros quilômetro quilômetros quilómetro quilómetros километр километра \
километров километры км キロメートル 킬로미터 كيلومتر किलोमीटर กิโลเมตร
centimeter centimètre centimètres centímetro centímetros сантиметр сантиметра сантиметров сантиметры см センチメートル \
センチ 센티미터 سنتيمتر सेंटीमीटर เซนติเมตร
millimeter millimètre millimètres milímetro milímetros миллиметр миллиметра миллиметров мм ミリメートル
mile миля мили миль マイル 마일 ميل मील ไมล์
foot fuß фут фута футов フィート 피트 قدم फीट ฟุต
inch дюйм дюйма дюймов インチ 인치 بوصة इंच นิ้ว
gram грамм грамма граммов グラム 그램 غرام جرام ग्राम กรัม
kilogram килограмм килограмма килограммов кг キログラム 킬로그램 كيلوغرام किलोग्राम กิโลกรัม
pound фунт фунта фунтов ポンド 파운드 رطل पाउंड ปอนด์
liter ℓ литр литра литров リットル 리터 لتر लीटर ลิตร
gallon galón galões галлон галлона галлонов ガロン 갤런
second секунда секунды секунд сек 초 ثانية सेकंड วินาที
minute минута минуты минут мин 분 دقيقة دقائق मिनट นาที phút
hour час часа часов ч 시간 ساعة ساعات घंटे घंटा ชั่วโมง giờ óra
day día días день дня дней 일 يوم أيام दिन วัน ngày gün dní dnů
week неделя недели недель 주 أسبوع सप्ताह สัปดาห์ tuần
month mês месяц месяца месяцев 개월 달 شهر महीने เดือน tháng měsíc měsíců
year année années año años год года лет 년 세 살 سنة سنوات साल वर्ष ปี år yıl év tuổi
degree degré degrés градус градуса градусов 도 درجة डिग्री
square carrée carrées квадратный квадратных квадратного кв
cubic кубический кубических кубического куб
dollar dólar dólares доллар доллара долларов доллары ドル 달러 دولار دولارات डॉलर ดอลลาร์
cent céntimo céntimos цент цента центов セント 센트
euro евро ユーロ 유로 يورو
ruble рубль рубля рублей рубли руб
yen иена иены иен
won 원
rupee рупия рупии рупий रुपये रुपया टका টাকা রুপি రూపాయలు
baht บาท
dong đồng
zloty zł złoty złotych złote
koruna kč
piece stück stücke pièce pièces штука штуки штук шт 개 つ ชิ้น cái chiếc
person человек человека 명 사람 شخص أشخاص लोग คน người kişi osób
child niño niños niña niñas criança crianças ребёнок ребенок детей дети ребёнка طفل أطفال बच्चे
student élève élèves étudiant étudiants étudiante étudiantes schüler schülerinnen ученик ученика учеников студент \
студента студентов طالب طلاب छात्र
girl mädchen девочка девочки девочек
boy garçon garçons мальчик мальчика мальчиков
egg œuf œufs яйцо яйца яиц بيضة ägg
apple äpfel яблоко яблока яблок maçã maçãs تفاحة सेब
book bücher книга книги книг 권 كتاب किताबें
page página páginas страница страницы страниц 쪽 페이지 ページ صفحة
pencil lápiz lápices lápis карандаш карандаша карандашей
flower цветок цветка цветов
tree bäume árbol árboles árvore árvores дерево дерева деревьев
car машина машины машин
word wörter слово слова слов
point точка точки точек очко очка очков балл балла баллов
time раз раза
unit unité unités единица единицы единиц
way способ способа способов manière manières façon façons
solution решение решения решений solución soluções
number число числа чисел
coin münze münzen монета монеты монет
glass gläser стакан стакана стаканов
ticket билет билета билетов
cookie печенье печений
ball мяч мяча мячей шар шара шаров
game игра игры игр
box коробка коробки коробок
bag мешок мешка мешков
room комната комнаты комнат
house häuser дом дома домов
animal животное животных
cat кошка кошки кошек
dog собака собаки собак
chicken hühner курица курицы кур
fish рыба рыбы рыб
cow kühe корова коровы коров
friend друг друга друзей
orange апельсин апельсина апельсинов
cup чашка чашки чашек
song песня песни песен
crêpe crêpes
piñata piñatas
jalapeño jalapeños
café cafés
entrée entrées
angstrom å ångström
step шаг шага шагов
"""
_NAMES = {
    word.casefold(): line.split()[0]
    for line in _TABLE.replace("\\\n", "").strip().splitlines()
    for word in line.split()
}
_WORD = re.compile(r"(?:[A-Za-z]|[^\x00-\x7f\s\u4e00-\u9fff])+")


def to_english(text: str) -> str | None:
    """Return the text of a unit with English names for foreign words; None if one of them is not known."""
    unknown = False

    def rename(match: re.Match[str]) -> str:
        nonlocal unknown
        word = unicodedata.normalize("NFC", match[0])
        foreign = any(letter.isalnum() and not letter.isascii() for letter in word)
        name = word if not foreign or find_measure(word) else _NAMES.get(word.casefold())
        unknown = unknown or name is None
        return name or word

    renamed = _WORD.sub(rename, text)
    return None if unknown else renamed
